"""Compile the C++ kernels for this machine on first use, cache the library, and call them.

The sources do not include torch's headers, so compiling takes seconds.
"""

import ctypes
import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from recmill.hardware.cpu import COMPILERS, FAULTS, cache_folder, cxx_compiler, instruction_sets
from recmill.kernels import COST_WITHOUT

log = logging.getLogger(__name__)

_SOURCES = [Path(__file__).with_name(name) for name in ("steps.cpp", "encoder.cpp", "catalogue.cpp")]
_ALSO_HASHED = [Path(__file__).with_name(name) for name in ("lanes.h", "product.h", "trial.py")]
# Without -ffast-math, which would hide NaN.
_FLAGS = (
    "-std=c++17 -O3 -march=native -mprefer-vector-width=512 -fopenmp -shared -fPIC "
    "-fno-math-errno -fno-trapping-math -fno-signed-zeros -fassociative-math"
)
_TIMEOUT_SECONDS = 120.0
_LOADING = threading.Lock()

# One letter per parameter of a kernel.
_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_PARAMETERS = {
    "sum_bags": "pppiippip",
    "update_bags": "pppppiippipiff",
    "pair_products": "ppiiiiip",
    "pair_products_backward": "pppiiiiipp",
    "add_bias_relu": "ppii",
    "relu_backward": "ppppii",
    "encoder_block": "pppppp",
    "encoder_block_backward": "pppppppp",
    "drop_elements": "piifpp",
    "catalogue_loss": "pppppiiifpppp",
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
        for argument in arguments:
            assert not isinstance(argument, Tensor) or argument.is_contiguous(), f"{kernel} needs contiguous tensors"
        function = getattr(self._functions, kernel)
        return function(*(value.data_ptr() if isinstance(value, Tensor) else value for value in arguments))


class _FaultError(Exception):
    """The library compiles, but calling it kills the process."""


def load_library() -> KernelLibrary | None:
    """Return the kernels, or None, with a warning, where they cannot be compiled or run."""
    with _LOADING:  # a second thread waits instead of compiling too
        return _load_or_warn()


@cache
def _load_or_warn() -> KernelLibrary | None:
    compiler = cxx_compiler()
    problem = f"no C++ compiler (CXX, {', '.join(COMPILERS)})"
    remedy = "Install g++ (Debian: apt-get install g++)"
    if compiler:
        try:
            return KernelLibrary(_compiled(compiler))
        except _FaultError as error:
            problem = str(error)
            remedy = "Set train.kernels=torch to train without this warning"
        except subprocess.SubprocessError as error:
            problem = f"{compiler} fails: {getattr(error, 'stderr', None) or error}".strip()
        except OSError as error:
            problem = str(error)
    log.warning("our own CPU kernels cannot be used here: %s. Training works. %s. %s.", problem, COST_WITHOUT, remedy)
    return None


def _compiled(compiler: str) -> Path:
    """Return the path of the compiled library, which has passed a trial run."""
    files = [path.read_bytes() for path in [*_SOURCES, *_ALSO_HASHED]]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_SECONDS).stdout
    facts = [*files, version, instruction_sets(), f"{compiler} {_FLAGS}".encode()]
    name = f"kernels-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:16]}.so"
    folder = cache_folder() or Path(tempfile.mkdtemp(prefix="recmill-"))  # then each process compiles its own
    cached = folder / name
    refusal = cached.with_suffix(".txt")  # why a library that compiles cannot be used here
    if not cached.is_file() and not refusal.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / name
            command = [compiler, *_FLAGS.split(), *map(str, _SOURCES), "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
            if fault := _trial_fault(built):
                refusal.write_text(fault, encoding="utf-8")
            else:
                os.replace(built, cached)  # atomic, also when several processes compile at once
    if refusal.is_file():
        raise _FaultError(refusal.read_text(encoding="utf-8"))
    return cached


def _trial_fault(library: Path) -> str | None:
    """Call kernels of a new library in a child process; return what killed it, if anything did.

    A hypervisor may fault on instructions that the CPU lists, and that the compiler therefore uses.
    """
    command = [sys.executable, "-P", "-m", "recmill.kernels.trial", str(library)]
    trial = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    if -trial.returncode in FAULTS:
        name = signal.Signals(-trial.returncode).name
        return f"a trial run was killed by {name}: this CPU, or its hypervisor, lacks an instruction that it lists"
    trial.check_returncode()
    return None
