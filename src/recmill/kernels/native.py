"""The C++ files here, compiled for this machine at first use and kept. Without torch's headers that takes seconds."""

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
# Not -ffast-math: whether a value is a number must stay visible.
_FLAGS = [
    *("-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
]
_COMPILERS = ("g++", "c++", "clang++")
_SECONDS = 120.0
_ONE_AT_A_TIME = threading.Lock()


def native() -> ctypes.CDLL | None:
    """None where it cannot be compiled: then torch's and FBGEMM's own kernels do the work. Who comes second waits."""
    with _ONE_AT_A_TIME:
        return _compiled_or_none()


@cache
def _compiled_or_none() -> ctypes.CDLL | None:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    problem = f"no C++ compiler ({', '.join(_COMPILERS)})"
    if compiler:
        try:
            return _declared(ctypes.CDLL(str(_compiled(compiler))))
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
    source = b"".join(path.read_bytes() for path in [*_SOURCES, *_HEADERS])
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_SECONDS).stdout
    facts = [source, version, _processor(), " ".join([compiler, *_FLAGS]).encode()]
    name = f"kernels-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:16]}.so"
    folder = _cache_folder()
    kept = folder / name
    if not kept.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / name
            command = [compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
            os.replace(made, kept)  # whole or not there, also when several processes compile at once
    return kept


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


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    signatures: dict[str, list[Any]] = {
        "sum_bags": [*[pointer] * 3, number, number, pointer, pointer, number, pointer],
        "update_bags": [*[pointer] * 5, number, number, pointer, pointer, number, pointer, number, real, real],
        "pair_products": [pointer, pointer, *[number] * 5, pointer],
        "pair_products_backward": [*[pointer] * 3, *[number] * 5, pointer, pointer],
        "add_bias_relu": [pointer, pointer, number, number],
        "relu_backward": [*[pointer] * 4, number, number],
        "encoder_block": [pointer] * 6,
        "encoder_block_backward": [pointer] * 8,
        "drop_elements": [pointer, number, number, real, pointer, pointer],
        "catalogue_loss": [*[pointer] * 5, number, number, number, real, *[pointer] * 4],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.sum_bags.restype = number
    return library


def run(kernel: Any, *arguments: Any) -> Any:
    """Tensors are passed as their address, and live until the kernel returns: a bare address would not keep them."""
    assert all(a.is_contiguous() for a in arguments if isinstance(a, Tensor)), "kernels walk straight through memory"
    return kernel(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))
