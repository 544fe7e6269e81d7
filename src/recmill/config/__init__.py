"""Strict run configs."""

from recmill.config.load import Config, differences, fingerprint, flat, load_config, plain, to_toml
from recmill.config.sections import RunSections, Section

__all__ = ["Config", "RunSections", "Section", "differences", "fingerprint", "flat", "load_config", "plain", "to_toml"]
