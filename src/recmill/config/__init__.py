"""Strict run configs."""

from recmill.config.load import Config, differences, fingerprint, flat, load_config, plain, to_toml
from recmill.config.sections import Section, Settings

__all__ = ["Config", "Section", "Settings", "differences", "fingerprint", "flat", "load_config", "plain", "to_toml"]
