"""Compile the C++ kernels for this machine on first use, cache the result, and call them.

The sources do without torch's headers, so compiling takes seconds.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

log = logging.getLogger(__name__)

_SOURCES = [Path(__file__).with_name(name) for name in ("steps.cpp", "encoder.cpp", "catalogue.cpp")]
_HEADERS = [Path(__file__).with_name(name) for name in ("lanes.h", "product.h")]
# Not -ffast-math: NaN must stay visible.
_FLAGS = [
    *("-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
]
_COMPILERS = ("g++", "c++", "clang++")
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


def load_library() -> KernelLibrary | None:
    """Return the kernels, or None where they cannot be compiled: torch's and FBGEMM's own do the work then.

    A second thread waits for the first.
    """
    with _LOADING:
        return _load_or_warn()


@cache
def _load_or_warn() -> KernelLibrary | None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    problem = f"no C++ compiler ({', '.join(_COMPILERS)})"
    if compiler:
        try:
            return KernelLibrary(_compiled(compiler))
        except subprocess.SubprocessError as error:
            problem = f"{compiler} fails: {getattr(error, 'stderr', None) or error}".strip()
        except OSError as error:
            problem = str(error)
    log.warning(
        "our own CPU kernels cannot be used here: %s. Training works, but steps of click models take 1.2 to 1.3 times, "
        "those of sequence models up to twice as long. Install g++ (Debian: apt-get install g++).",
        problem,
    )
    return None


def _compiled(compiler: str) -> Path:
    """Return the path of the compiled library, from the cache if it is there."""
    source = b"".join(path.read_bytes() for path in [*_SOURCES, *_HEADERS])
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_TIMEOUT_SECONDS).stdout
    facts = [source, version, _processor(), " ".join([compiler, *_FLAGS]).encode()]
    name = f"kernels-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:16]}.so"
    folder = _cache_folder()
    cached = folder / name
    if not cached.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / name
            command = [compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(built)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
            os.replace(built, cached)  # atomic, also when several processes compile at once
    return cached


def _cache_folder() -> Path:
    """A private one: what lies in it is executed."""
    try:
        folder = Path.home() / ".cache" / "recmill"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError):  # no home, or not writable: compiled anew in each process
        return Path(tempfile.mkdtemp(prefix="recmill-"))


def _processor() -> bytes:
    """A home directory may be shared by machines that know other instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.machine().encode()
    return b"|".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))
