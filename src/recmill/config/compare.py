"""Whether two configs describe the same run: keys and sections marked `MayChange` may differ."""

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import xxhash

from recmill.config.load import Config
from recmill.config.sections import MAY_CHANGE, Section, Settings, named_sections, subsection


def differences(old: Config, new: Config) -> list[str]:
    """Return 'key: old -> new' for each key that makes `new` another run than `old`."""
    before, after = _fixed(old.as_dict()), _fixed(new.as_dict())
    keys = sorted(before.keys() | after.keys())
    return [f"{key}: {before.get(key)!r} -> {after.get(key)!r}" for key in keys if before.get(key) != after.get(key)]


def fingerprint(config: Config) -> str:
    """Return a digest that is the same for all configs of a run, also in later versions with more keys."""
    fixed = _fixed(config.as_dict(exclude_defaults=True))
    return xxhash.xxh3_64_hexdigest(json.dumps(fixed, sort_keys=True).encode())


def changeable_keys(section: type[Section] = Settings, prefix: str = "") -> set[str]:
    """Return the keys and sections that may change; `*` stands for any name."""
    found = set()
    for name, field in section.model_fields.items():
        if MAY_CHANGE in field.metadata:
            found.add(f"{prefix}{name}")
        elif inner := subsection(field):
            found |= changeable_keys(inner, f"{prefix}{name}.")
        elif inner := named_sections(field):
            found |= changeable_keys(inner, f"{prefix}{name}.*.")
    return found


def _fixed(values: Mapping[str, Any]) -> dict[str, Any]:
    patterns = [f"{key}.*" for key in changeable_keys()]
    all_keys = flat(values)
    return {key: all_keys[key] for key in all_keys if not any(fnmatchcase(f"{key}.", pattern) for pattern in patterns)}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by their full keys, like "optim.dense.lr"."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
