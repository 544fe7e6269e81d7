"""The tests of every module are where CONTRIBUTING.md says."""

import re
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

REPO = Path(__file__).parents[2]
SOURCE = REPO / "src" / "recmill"
MODULES = sorted(
    file.relative_to(SOURCE) for file in SOURCE.rglob("*.py") if file.name not in ("__init__.py", "__main__.py")
)


def exceptions() -> list[tuple[str, str]]:
    """Return (pattern of modules, test file) for each module named in the table of CONTRIBUTING.md."""
    chapter = (REPO / "CONTRIBUTING.md").read_text(encoding="utf-8").split("### Where the tests of a module are")[1]
    rows = re.findall(r"^\| (`.*`) \| `(tests/.*)` \|$", chapter.split("\n## ")[0], flags=re.M)
    return [(pattern, tests) for cell, tests in rows for pattern in re.findall(r"`([^`]+\.py)`", cell)]


def by_rule(module: Path) -> str:
    package = module.parts[0] if len(module.parts) > 1 and (REPO / "tests" / "unit" / module.parts[0]).is_dir() else ""
    return str(Path("tests", "unit", package, f"test_{module.stem}.py"))


def exception_for(module: Path) -> tuple[str, str] | None:
    """Return the first entry of the table that names the module."""
    return next((entry for entry in exceptions() if fnmatchcase(str(module), entry[0])), None)


def test_every_module_has_a_test_file_where_contributing_says() -> None:
    missing = []
    for module in MODULES:
        entry = exception_for(module)
        tests = entry[1].replace("*", module.stem) if entry else by_rule(module)
        if not (REPO / tests).is_file():
            missing.append(f"{module}: no {tests}")
    assert not missing, "Add these tests, or the modules to the table of CONTRIBUTING.md:\n" + "\n".join(missing)


def test_modules_of_the_same_name_do_not_share_a_test_file_by_accident() -> None:
    modules = defaultdict(list)
    for module in MODULES:
        if exception_for(module) is None:
            modules[by_rule(module)].append(str(module))
    assert {tests: named for tests, named in modules.items() if len(named) > 1} == {}


def test_every_entry_of_the_table_names_a_module() -> None:
    used = {exception_for(module) for module in MODULES}
    assert [pattern for pattern, tests in exceptions() if (pattern, tests) not in used] == []
    assert len(exceptions()) > 20
