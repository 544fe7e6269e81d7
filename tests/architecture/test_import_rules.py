"""The lines between the rooms, held by reading every import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "recmill"
FILES = sorted(SOURCE.rglob("*.py"))

# room -> what of recmill it may import, besides itself; None: everything
MAY_IMPORT: dict[str, set[str] | None] = {
    "cli": {"commands", "errors", "registry", "observe", "launch", "recmill"},
    "__main__": {"cli"},
    "commands": None,
    "worker": {"failpoints", "launch", "errors", "observe", "stop", "world"},
    "training": {
        "config",
        "errors",
        "failpoints",
        "hardware",
        "kernels",
        "metrics",
        "observe",
        "rng",
        "schema",
        "stop",
        "watchdog",
        "world",
    },
    "tasks": {"batch", "config", "metrics"},
    "models": {"config", "nn", "schema"},
    "kernels": {"failpoints", "hardware"},
    "hardware": {"failpoints"},
    "nn": {"kernels", "schema"},
    "stores": set(),
    "data": {"batch", "companions", "errors", "metrics", "rng", "schema", "stored"},
    "datasets": {
        "companions",
        "config",
        "errors",
        "failpoints",
        "hardware",
        "metrics",
        "observe",
        "recmill",
        "rng",
        "schema",
        "stored",
    },
    "metrics": {"rng", "world"},
    "launch": {"errors", "hardware", "stop", "watchdog"},
    "observe": {"errors", "hardware", "recmill", "world"},
    "config": {"errors", "recmill", "registry"},
    "schema": {"errors", "stored"},
    "stored": {"errors", "schema"},
    "registry": {"errors"},
    "world": {"errors"},
    "batch": set(),
    "companions": set(),
    "rng": set(),
    "errors": set(),
    "failpoints": {"errors"},
    "stop": {"errors"},
    "watchdog": set(),
    "recmill": {"commands"},
}
TORCH_FREE = ("datasets", "hardware", "launch", "models", "config", "metrics")
TORCH_FREE_FILES = ("trial.py", "cli.py", "schema.py", "registry.py", "rng.py", "stop.py", "watchdog.py")


def room_of(file: Path) -> str:
    first = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "recmill" if first == "__init__" else first


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def imported_room(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] != "recmill":
        return None
    return (
        parts[1]
        if (len(parts) > 1 and (SOURCE / parts[1]).exists()) or (SOURCE / f"{parts[1]}.py").exists()
        else "recmill"
    )


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_a_room_imports_only_what_it_may(file: Path) -> None:
    room = room_of(file)
    allowed = MAY_IMPORT[room]
    if allowed is None:
        return
    found = {imported_room(name) for name in imports(file)} - {None, room}
    assert found <= allowed, f"{room} may not import {found - allowed}"


@pytest.mark.parametrize("plugins", ["models", "datasets", "tasks", "stores"])
def test_plug_ins_share_code_only_through_modules_that_are_no_plug_ins(plugins: str) -> None:
    from recmill import registry

    registered = set(getattr(registry, plugins.upper()).values())
    for file in (SOURCE / plugins).glob("*.py"):
        own = f"recmill.{plugins}.{file.stem}"
        for name in imports(file):
            module = name.rpartition(".")[0]
            assert module not in registered - {own}, f"{own} imports {module}"


def mentions(file: Path, name: str) -> bool:
    return any(used == name or used.startswith(f"{name}.") for used in imports(file))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_distributed_code_stays_in_its_rooms(file: Path) -> None:
    relative = str(file.relative_to(SOURCE))
    if mentions(file, "torchrec.distributed"):
        may = ("plan", "shard", "optim", "precision", "step")
        assert relative in [f"training/{name}.py" for name in may] or relative.startswith("stores/")
    if mentions(file, "torch.distributed"):
        assert relative == "world.py" or relative.startswith("training/")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_environment_and_printing_stay_in_their_rooms(file: Path) -> None:
    relative = str(file.relative_to(SOURCE))
    names = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    if names & {"environ", "getenv"}:
        assert relative in ("world.py", "worker.py", "failpoints.py") or relative.startswith(("launch/", "hardware/"))
    if "print" in calls:
        assert relative in ("cli.py", "observe/printed.py")


def test_preparing_launching_and_checking_configs_need_no_torch() -> None:
    rooms = [f for f in FILES if (room_of(f) in TORCH_FREE and f.name != "probe.py") or f.name in TORCH_FREE_FILES]
    modules = [
        "recmill." + str(f.relative_to(SOURCE).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for f in rooms
    ] + [
        "recmill.commands.prepare",
        "recmill.commands.adopt",
        "recmill.commands.audit",
        "recmill.commands.download",
        "recmill.commands.split",
        "recmill.commands.train",
        "recmill.commands.evaluate",
        "recmill.commands.recommend",
    ]
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['torchrec'] = sys.modules['fbgemm_gpu'] = None\n"
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_room_is_on_the_list() -> None:
    assert {room_of(file) for file in FILES} == set(MAY_IMPORT)
