"""Strict run configs: `load_config` reads a TOML file into typed sections, or reports everything that is wrong."""

from recmill.config.compare import differences, fingerprint, flat
from recmill.config.load import (
    Config,
    Overrides,
    key_of,
    load_config,
    override_texts,
    plain,
    read_settings,
    read_toml,
    to_toml,
)
from recmill.config.problems import meant_keys
from recmill.config.sections import Section, Settings, config_keys
