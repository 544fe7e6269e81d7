"""The table of a schema's keys in docs/own-data.md: `python -m tests.schema_page` writes it anew."""

import json
from pathlib import Path
from typing import get_args

from pydantic.fields import FieldInfo

from recmill.config import Section
from recmill.datasets.own_clicks import schema

PAGE = Path(__file__).parents[1] / "docs" / "own-data.md"
_START, _END = "<!-- keys -->\n", "<!-- end of keys -->\n"
_SECTIONS: dict[str, type[Section]] = {
    "input": schema.InputSection,
    "label": schema.LabelSection,
    "time": schema.TimeSection,
    "split": schema.SplitSection,
    "sample": schema.SampleSection,
    "keep": schema.KeepSection,
}
_FEATURES: list[type[Section]] = [
    schema.CategoricalFeature,
    schema.NumericFeature,
    schema.BucketFeature,
    schema.TimeFeature,
    schema.CrossFeature,
]


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for section, cls in _SECTIONS.items():
        lines.append(f"| **{section}** | | |")
        lines += [_line(name, field) for name, field in cls.model_fields.items()]
    for cls in _FEATURES:
        kind = cls.model_fields["type"]
        lines.append(f'| **feature, type = "{get_args(kind.annotation)[0]}"** | | {kind.description} |')
        lines += [_line(name, field) for name, field in cls.model_fields.items() if name != "type"]
    return "\n".join(lines) + "\n"


def _line(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
    return f"| `{name}` | {default} | {field.description} |"


def page(text: str) -> str:
    """Return the page with the table of now."""
    before, _, rest = text.partition(_START)
    return before + _START + table() + _END + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
