"""Compile the C++ kernels for this machine on first use, cache the library, and call them.

The sources do not include torch's headers, so compiling takes seconds.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from recmill.errors import ResourceError, UserError
from recmill.files.atomic import new_file, write_json
from recmill.files.digests import digest
from recmill.hardware.child import last_line, run_child
from recmill.hardware.cpu import COMPILERS, FAULTS, cache_folder, cxx_compiler, instruction_sets
from recmill.kernels import COST_WITHOUT

log = logging.getLogger(__name__)

_Library = TypeVar("_Library")


@dataclass(frozen=True)
class _Recipe:
    name: str
    sources: tuple[str, ...]
    also_hashed: tuple[str, ...]
    flags: str
    needs_trial: bool


_KERNELS = _Recipe(
    "kernels",
    ("steps.cpp", "encoder.cpp", "catalogue.cpp"),
    ("lanes.h", "product.h", "trial.py"),
    # Without -ffast-math, which would hide NaN.
    "-std=c++17 -O3 -march=native -mprefer-vector-width=512 -fopenmp -shared -fPIC "
    "-fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math",
    needs_trial=True,
)
# First values must have the bits of rng.py, so nothing may be contracted.
_ROWS = _Recipe(
    "rows",
    ("rows.cpp", "disk_probe.cpp", "keys.cpp"),
    ("row_reader.h", "row_forecast.h"),
    "-std=c++17 -O2 -ffp-contract=off -pthread -shared -fPIC",
    needs_trial=False,
)
_MAX_SECONDS = 60.0  # for everything, also for waiting until another process has compiled; it takes 3 s
_POLL_SECONDS = 0.1
_LOADING = threading.Lock()

# One letter per parameter of a kernel.
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_PARAMETERS = {
    "sum_bags": "pppiippip",
    "update_bags": "pppppippiippipip",
    "pair_products": "ppiiiiip",
    "pair_products_backward": "pppiiiiipp",
    "add_bias_relu": "ppii",
    "relu_backward": "ppppii",
    "encoder_block": "pppppp",
    "encoder_block_backward": "pppppppp",
    "drop_elements": "piifpp",
    "catalogue_loss": "pppppiiifppppppp",
}


class KernelLibrary:
    """The compiled kernels. They have no state and share torch's OpenMP threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._functions = ctypes.CDLL(str(path))
        for name, parameters in _PARAMETERS.items():
            function = getattr(self._functions, name)
            function.argtypes = [_TYPES[letter] for letter in parameters]
            function.restype = None
        self._functions.sum_bags.restype = ctypes.c_int64

    def call(self, kernel: str, *arguments: Any) -> Any:
        """Call a kernel by name. Tensors are passed by address; they must be contiguous."""
        function = getattr(self._functions, kernel)
        return function(*(_address(kernel, value) if hasattr(value, "data_ptr") else value for value in arguments))


def _address(kernel: str, tensor: Any) -> int:
    assert tensor.is_contiguous(), f"{kernel} needs contiguous tensors"
    return int(tensor.data_ptr())


class _FaultError(Exception):
    """The library compiles, but calling it fails or kills the process."""


class _UnusableError(Exception):
    """A library cannot be compiled or run here."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


def load_library() -> KernelLibrary | None:
    """Return the kernels, or None, with a warning, where they cannot be compiled or run."""
    with _LOADING:  # a second thread waits instead of compiling too
        return _load_or_warn()


@cache
def _load_or_warn() -> KernelLibrary | None:
    try:
        return _load(_KERNELS, KernelLibrary)
    except _UnusableError as error:
        log.warning(
            "our own CPU kernels cannot be used here: %s. Training works. %s. %s.",
            error.problem,
            COST_WITHOUT,
            error.remedy,
        )
        return None


@cache
def load_rows_library() -> ctypes.CDLL:
    """Return the compiled rows.cpp and keys.cpp. Raise ResourceError if it cannot be compiled."""
    try:
        return _load(_ROWS, lambda path: ctypes.CDLL(str(path)))
    except _UnusableError as error:
        raise ResourceError(
            "tables.store = 'cached_ssd' and tables.dynamic need code that cannot be compiled here: "
            f"{error.problem}. {error.remedy}."
        ) from error


def _load(recipe: _Recipe, load: Callable[[Path], _Library]) -> _Library:
    compiler = cxx_compiler()
    if not compiler:
        problem = f"no C++ compiler (CXX, {', '.join(COMPILERS)})"
        raise _UnusableError(problem, "Install g++ (Debian: apt-get install g++)")
    folder = cache_folder()
    remedy = "Install g++ (Debian: apt-get install g++)"
    try:
        # Without a cache, each process compiles its own. A loaded library needs its file no more.
        with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="recmill-") as parent:
            return load(_compiled(recipe, compiler, Path(parent)))
    except _FaultError as error:
        problem = str(error)
        remedy = "Set train.kernels=torch to train without this warning"
    except subprocess.CalledProcessError as error:
        problem = f"{compiler} fails: {error.stderr or error}".strip()
    except (TimeoutError, subprocess.TimeoutExpired):
        problem = f"{compiler} does not finish within {_MAX_SECONDS:.0f} s"
        remedy = "Set CXX to a compiler that works" + (", or train.kernels=torch" if recipe is _KERNELS else "")
    except (OSError, UserError) as error:
        problem = str(error).rstrip(".")
        remedy = f"Check the disk and the permissions of {folder or 'TMPDIR'}"
    raise _UnusableError(problem, remedy)


def _compiled(recipe: _Recipe, compiler: str, folder: Path) -> Path:
    """Return the path of the compiled library, which has passed a trial run."""
    # The compiler's file stands for its version: asking the compiler could hang.
    file = Path(compiler).stat()
    facts = [_source(name).read_bytes() for name in (*recipe.sources, *recipe.also_hashed)]
    facts += [instruction_sets(), f"{compiler} {file.st_size} {file.st_mtime_ns} {recipe.flags}".encode()]
    library = folder / f"{recipe.name}-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:16]}.so"
    note = _read_note(library)
    if note is None:
        log.info("compiling CPU %s with %s; this takes seconds, once per machine", recipe.name, compiler)
        deadline = time.monotonic() + _MAX_SECONDS
        with _lock(library.with_suffix(".lock"), deadline):
            note = _read_note(library) or _build(recipe, compiler, library, deadline)
    if fault := note.get("fault"):
        raise _FaultError(fault)
    return library


def _read_note(library: Path) -> dict[str, str] | None:
    """Return the note on a library: its digest, or why it cannot be used here. None if it must be compiled.

    Loading a corrupt library may kill this process, so its digest is compared first.
    """
    try:
        note = json.loads(library.with_suffix(".json").read_bytes())
        is_good = isinstance(note["fault"], str) if "fault" in note else note["digest"] == digest(library)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # missing or corrupt
        return None
    return note if is_good else None


@contextlib.contextmanager
def _lock(path: Path, deadline: float) -> Iterator[None]:
    """Wait until no other process compiles the same library; raise TimeoutError at the deadline."""
    with path.open("w", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError from None
                time.sleep(_POLL_SECONDS)
            except OSError:  # a file system without locks: then several processes compile
                break
        yield


def _source(name: str) -> Path:
    return Path(__file__).with_name(name)


def _build(recipe: _Recipe, compiler: str, library: Path, deadline: float) -> dict[str, str]:
    """Compile the library, call it in a child process, and keep both results. Return the note."""
    with new_file(library) as built:
        command = [compiler, *recipe.flags.split(), *map(str, map(_source, recipe.sources)), "-o", str(built)]
        run_child(command, deadline - time.monotonic()).check_returncode()
        fault = _trial_fault(built, deadline) if recipe.needs_trial else None
        note = {"fault": fault} if fault else {"digest": digest(built)}
    write_json(library.with_suffix(".json"), note)
    return note


def _trial_fault(library: Path, deadline: float) -> str | None:
    """Call kernels of a new library in a child process; return what killed it, if anything did.

    A hypervisor may fault on instructions that the CPU lists, and that the compiler therefore uses.
    """
    command = [sys.executable, "-P", "-m", "recmill.kernels.trial", str(library)]
    trial = run_child(command, deadline - time.monotonic())
    if -trial.returncode in FAULTS:
        return f"a trial run was {last_line(trial)}: this CPU, or its hypervisor, lacks an instruction that it lists"
    if trial.returncode:
        raise _FaultError(f"a trial run failed: {last_line(trial)}")
    return None
