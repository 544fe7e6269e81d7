"""Compile the C++ kernels for this machine on first use, cache the result, and call them.

The sources do without torch's headers, so compiling takes seconds.
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
_HEADERS = [Path(__file__).with_name(name) for name in ("lanes.h", "product.h")]
# Not -ffast-math: NaN must stay visible.
_FLAGS = [
    *("-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
]
_TRIAL = Path(__file__).with_name("trial.py")
_TIMEOUT_SECONDS = 120.0
_LOADING = threading.Lock()

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "sum_bags": [*[_POINTER] * 3, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER],
    "update_bags": [*[_POINTER] * 5, _INT, _INT, _POINTER, _POINTER, _INT, _POINTER, _INT, _FLOAT, _FLOAT],
    "pair_products": [_POINTER, _POINTER, *[_INT] * 5, _POINTER],
    "pair_products_backward": [*[_POINTER] * 3, *[_INT] * 5, _POINTER, _POINTER],
    "add_bias_relu": [_POINTER, _POINTER, _INT, _INT],
    "relu_backward": [*[_POINTER] * 4, _INT, _INT],
    "encoder_block": [_POINTER] * 6,
    "encoder_block_backward": [_POINTER] * 8,
    "drop_elements": [_POINTER, _INT, _INT, _FLOAT, _POINTER, _POINTER],
    "catalogue_loss": [*[_POINTER] * 5, _INT, _INT, _INT, _FLOAT, *[_POINTER] * 4],
}


class KernelLibrary:
    """The compiled kernels. They have no state and share torch's OpenMP threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._functions = ctypes.CDLL(str(path))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._functions, name)
            function.argtypes = arguments
            function.restype = None
        self._functions.sum_bags.restype = _INT

    def call(self, kernel: str, *arguments: Any) -> Any:
        """Call a kernel by name. Tensors are passed by address; they must be contiguous."""
        for argument in arguments:
            assert not isinstance(argument, Tensor) or argument.is_contiguous(), f"{kernel} needs contiguous tensors"
        function = getattr(self._functions, kernel)
        return function(*(value.data_ptr() if isinstance(value, Tensor) else value for value in arguments))


class _FaultError(Exception):
    """The library compiles, but running it kills the process."""


def load_library() -> KernelLibrary | None:
    """Return the kernels, or None where they cannot be compiled or run.

    torch's and FBGEMM's own do the work then. A second thread waits for the first.
    """
    with _LOADING:
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
    """Return the path of the compiled library. A cached one has passed its trial run."""
    source = b"".join(path.read_bytes() for path in [*_SOURCES, *_HEADERS])
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_SECONDS).stdout
    facts = [source, _TRIAL.read_bytes(), version, instruction_sets(), " ".join([compiler, *_FLAGS]).encode()]
    name = f"kernels-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:16]}.so"
    folder = cache_folder() or Path(tempfile.mkdtemp(prefix="recmill-"))  # then each process compiles its own
    cached = folder / name
    refused = cached.with_suffix(".txt")  # why a library that compiles cannot be used here
    if refused.is_file():
        raise _FaultError(refused.read_text(encoding="utf-8"))
    if not cached.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / name
            command = [compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
            if fault := _trial_fault(built):
                refused.write_text(fault, encoding="utf-8")
                raise _FaultError(fault)
            os.replace(built, cached)  # atomic, also when several processes compile at once
    return cached


def _trial_fault(library: Path) -> str | None:
    """Run kernels of a new library in a child process; return what killed it, if anything did.

    A hypervisor may fault on instructions that the CPU lists, and that the compiler therefore uses.
    """
    command = [sys.executable, "-P", "-m", "recmill.kernels.trial", str(library)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
    except subprocess.CalledProcessError as error:
        if -error.returncode not in FAULTS:
            raise
        name = signal.Signals(-error.returncode).name
        return f"a trial run was killed by {name}: this CPU, or its hypervisor, lacks an instruction that it lists"
    return None
