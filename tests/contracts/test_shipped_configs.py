"""Every shipped config is right, and every config key is documented."""

import json
from pathlib import Path

import pytest

from recmill import registry
from recmill.config import RunSections, load_config
from recmill.config.sections import Section

REPO = Path(__file__).parents[2]
CONFIGS = sorted((REPO / "configs").rglob("*.toml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: str(f.relative_to(REPO)))
def test_it_parses(file: Path) -> None:
    assert load_config(file).model_name in registry.MODELS


def test_every_model_has_a_config() -> None:
    assert {load_config(file).model_name for file in CONFIGS} == set(registry.MODELS)


def documented(section: type[Section], prefix: str) -> list[str]:
    """The line of each key in docs/configs.md."""
    lines: list[str] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            lines += documented(kind, f"{prefix}{name}.")
        else:
            assert field.description, f"{prefix}{name} has no help"
            default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
            lines.append(f"| `{prefix}{name}` | {default} | {field.description} |")
    return lines


def test_the_documentation_has_every_key_with_its_default_and_help() -> None:
    page = (REPO / "docs" / "configs.md").read_text(encoding="utf-8")
    expected = documented(RunSections, "")
    for name in registry.MODELS:
        expected += documented(registry.load(registry.MODELS, name, "model").Config, "model.")
    assert [line for line in expected if line not in page] == []
