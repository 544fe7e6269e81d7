"""Write the tables of docs/configs.md, from the config sections: python -m tests.config_page"""

import json
import re
from pathlib import Path

from recmill import registry
from recmill.config import Section, Settings

PAGE = Path(__file__).parent.parent / "docs" / "configs.md"


def keys(section: type[Section], prefix: str = "") -> list[str]:
    """Return every key of a section and of the sections in it, with `prefix`."""
    found = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        is_section = isinstance(kind, type) and issubclass(kind, Section)
        found += keys(kind, f"{prefix}{name}.") if is_section else [f"{prefix}{name}"]
    return found


def _line(section: type[Section], prefix: str, key: str) -> str:
    *path, name = key.removeprefix(prefix).split(".")
    for part in path:
        section = section.model_fields[part].annotation
    field = section.model_fields[name]
    assert field.description, f"{key} has no help"
    default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
    return f"| `{key}` | {default} | {field.description} |"


def table(section: type[Section], prefix: str = "") -> str:
    lines = [_line(section, prefix, key) for key in keys(section, prefix)]
    return "\n".join(["| key | default | description |", "|---|---|---|", *lines])


def with_current_tables(page: str) -> str:
    """Return the page with the table under each heading replaced by what the code says."""
    tables = {"## Keys of every run": table(Settings)}
    for name in registry.MODELS:
        tables[f'## `model.name = "{name}"`'] = table(registry.load(registry.MODELS, name, "model").Config, "model.")
    for heading, current in tables.items():
        assert page.count(f"{heading}\n") == 1, f"docs/configs.md has no section {heading!r}"
        before, after = page.split(f"{heading}\n")
        page = before + f"{heading}\n" + re.sub(r"(\|.*\n)+", lambda _, t=current: f"{t}\n", after, count=1)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_current_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
