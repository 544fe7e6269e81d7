"""The rules of docs/architecture.md on who imports whom, checked by reading every import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "recmill"
FILES = sorted(SOURCE.rglob("*.py"))

# What each package or module of recmill may import from recmill, besides itself. None: everything.
MAY_IMPORT: dict[str, set[str] | None] = {
    "__main__": {"cli", "launch"},
    "batch": {"tables"},
    "checkpoints": {"config", "errors", "failpoints", "files", "hardware", "launch", "rng", "tables", "world"},
    "cli": {"commands", "config", "environment", "errors", "launch", "observe", "recmill", "registry"},
    "commands": None,
    "compat": {"errors", "registry"},
    "config": {"errors", "registry"},
    "contracts": {"commands", "config", "data", "datasets", "protocols", "registry", "schema"},
    "data": {"batch", "errors", "files", "hardware", "metrics", "observe", "rng", "schema"},
    "datasets": {
        "config", "data", "errors", "failpoints", "files", "hardware", "kernels", "metrics", "observe", "recmill",
        "registry", "rng", "schema",
    },
    "environment": {"errors"},
    "errors": set(),
    "failpoints": {"environment", "errors"},
    "files": {"errors", "failpoints"},
    "hardware": {"errors", "failpoints", "files"},
    "jobs": {"config", "errors", "files", "launch", "observe", "registry"},
    "kernels": {"errors", "failpoints", "files", "hardware"},
    "launch": {"environment", "errors", "files", "hardware", "observe", "registry", "tables", "world"},
    "metrics": {"observe", "protocols", "rng", "world"},
    "models": {"config", "data", "errors", "nn", "schema", "tables"},
    "nn": {"kernels", "tables"},
    "observe": {"errors", "failpoints", "files", "hardware", "recmill", "world"},
    "planning": {"checkpoints", "config", "errors", "files", "hardware", "observe", "registry", "schema", "tables"},
    "protocols": {"config", "data", "metrics", "tables", "world"},
    "recmill": {"commands"},
    "registry": {"errors"},
    "rng": set(),
    "schema": set(),
    "tables": {"config", "errors", "failpoints", "hardware", "kernels", "rng", "world"},
    "tasks": {"batch", "config", "errors", "metrics", "registry"},
    "training": {
        "checkpoints", "config", "errors", "failpoints", "files", "hardware", "launch", "metrics", "observe",
        "protocols", "tables", "world",
    },
    "world": {"environment", "errors"},
}  # fmt: skip
TORCH_FREE = {
    "cli",
    "compat",
    "config",
    "datasets",
    "errors",
    "failpoints",
    "files",
    "hardware",
    "jobs",
    "launch",
    "metrics",
}
TORCH_FREE |= {"environment", "models", "observe", "protocols", "registry", "rng", "schema"}
TORCH_FREE_MODULES = [
    *(f"recmill.commands.{name}" for name in ("adopt", "audit", "checkpoint", "configs", "doctor", "download")),
    *(f"recmill.commands.{name}" for name in ("evaluate", "export_metrics", "history", "plot", "prepare", "recommend")),
    *(f"recmill.commands.{name}" for name in ("check_plugin", "jobs", "launch", "report", "results", "split", "trace")),
    *(
        f"recmill.commands.{name}"
        for name in (
            "calibrate",
            "compare",
            "explain",
            "flags",
            "import_rows",
            "items",
            "plan",
            "predict",
            "run_like",
            "schema",
            "train",
            "tune",
        )
    ),
    *("recmill.planning.devices", "recmill.planning.published"),
    *("recmill.checkpoints.choosing", "recmill.checkpoints.format", "recmill.tables.pins", "recmill.tables.spec"),
    *(f"recmill.data.{name}" for name in ("checks", "click_rows", "npy_files", "opening", "parquet_files", "seen")),
    *("recmill.data.verification", "recmill.data.windows"),
]
MAY_IMPORT_TORCHREC_DISTRIBUTED = {"tables", "training"}
MAY_IMPORT_TORCH_DISTRIBUTED = {"checkpoints", "tables", "training", "world"}
MAY_READ_ENVIRONMENT = {"environment", "failpoints", "hardware", "jobs", "launch"}
MAY_PRINT = {"cli.py", "observe/printed.py"}


def package_of(file: Path) -> str:
    first = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "recmill" if first == "__init__" else first


def module_of(file: Path) -> str:
    return ".".join(["recmill", *file.relative_to(SOURCE).with_suffix("").parts]).removesuffix(".__init__")


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_package(name: str) -> str | None:
    if name.split(".")[0] != "recmill":
        return None
    second = [*name.split("."), ""][1]
    return second if ((SOURCE / second).is_dir() and second) or (SOURCE / f"{second}.py").exists() else "recmill"


def test_a_package_imports_what_the_architecture_allows_and_nothing_else() -> None:
    assert {package_of(file) for file in FILES} == set(MAY_IMPORT)
    used: dict[str, set[str]] = {package: set() for package in MAY_IMPORT}
    broken = []
    for file in FILES:
        package = package_of(file)
        allowed = MAY_IMPORT[package]
        found = {name for name in map(imported_package, imports(file)) if name} - {package}
        used[package] |= found
        if allowed is not None and found - allowed:
            broken.append(f"{file.relative_to(SOURCE)} imports {sorted(found - allowed)}")
    broken += [f"nothing in {p} imports {sorted(a - used[p])}" for p, a in MAY_IMPORT.items() if a and a - used[p]]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("plugins", ["models", "datasets", "tasks"])
def test_plug_ins_share_code_only_through_modules_that_are_no_plug_ins(plugins: str) -> None:
    from recmill import registry

    registered = set(getattr(registry, plugins.upper()).values())
    for file in FILES:
        if module_of(file) in registered:
            imported = {name.rpartition(".")[0] for name in imports(file)}
            assert not imported & (registered - {module_of(file)}), file


def test_distributed_code_environment_variables_and_printing_stay_in_their_packages() -> None:
    broken = []
    for file in FILES:
        package, names = package_of(file), list(imports(file))
        tree = ast.parse(file.read_text(encoding="utf-8"))
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        uses = {
            "torchrec.distributed": any(name.startswith("torchrec.distributed") for name in names),
            "torch.distributed": any(name.startswith("torch.distributed") for name in names),
            "os.environ": bool(attributes & {"environ", "getenv"}),
            "print": "print" in calls,
        }
        allowed = {
            "torchrec.distributed": package in MAY_IMPORT_TORCHREC_DISTRIBUTED,
            "torch.distributed": package in MAY_IMPORT_TORCH_DISTRIBUTED,
            "os.environ": package in MAY_READ_ENVIRONMENT,
            "print": str(file.relative_to(SOURCE)) in MAY_PRINT,
        }
        broken += [
            f"{file.relative_to(SOURCE)} uses {what}" for what, is_used in uses.items() if is_used > allowed[what]
        ]
    assert not broken, "\n".join(broken)


def test_preparing_launching_and_checking_configs_need_no_torch() -> None:
    modules = [module_of(file) for file in FILES if package_of(file) in TORCH_FREE] + TORCH_FREE_MODULES
    modules = [
        name for name in modules if name not in ("recmill.hardware.probe", "recmill.jobs.torchx_component")
    ]  # one runs torch in a child process, torchx reads the other
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
