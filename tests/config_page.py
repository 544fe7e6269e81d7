"""Write the tables of docs/configs.md, from the config sections: python -m tests.config_page"""

import json
import re
from pathlib import Path

from pydantic.fields import FieldInfo

from recmill import registry
from recmill.config import Section, Settings
from recmill.config.sections import named_sections

PAGE = Path(__file__).parent.parent / "docs" / "configs.md"


def fields(section: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """Return every key of a section and of the sections in it, with `prefix`."""
    found: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= fields(kind, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field
            if inner := named_sections(field):
                found |= fields(inner, f"{prefix}{name}.NAME.")
    return found


def table(section: type[Section], prefix: str = "") -> str:
    lines = ["| key | default | description |", "|---|---|---|"]
    for key, field in fields(section, prefix).items():
        assert field.description, f"{key} has no help"
        default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
        lines.append(f"| `{key}` | {default} | {field.description} |")
    return "\n".join(lines)


def with_current_tables(page: str) -> str:
    """Return the page with the table under each heading replaced by what the code says."""
    tables = {"## Keys of every run": table(Settings)}
    for name in registry.MODELS:
        tables[f'## `model.name = "{name}"`'] = table(registry.load(registry.MODELS, name, "model").Config, "model.")
    for heading, current in tables.items():
        found = re.search(rf"(?<=^{re.escape(heading)}\n\n)(\|.*\n)+", page, flags=re.M)
        assert found, f"docs/configs.md has no table under {heading!r}"
        page = f"{page[: found.start()]}{current}\n{page[found.end() :]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_current_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
