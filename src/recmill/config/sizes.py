"""Sizes in bytes as users write them."""

import re

from recmill.errors import ConfigError

_MAX_CHARACTERS = 50


def parse_bytes(text: str, option: str) -> int:
    """Return the bytes of a size like 4GB, 512 MB or 1.5GiB; `option` names it in the error."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match or len(text) > _MAX_CHARACTERS:
        raise ConfigError(f"{option} {text[:_MAX_CHARACTERS]!r}: expected a size like 4GB or 512MB.")
    number, unit, binary = match.groups()
    exponent = " KMGT".index(unit.upper() or " ")
    return int(float(number) * (1024 if binary else 1000) ** exponent)
