"""The C++ files here, compiled for this machine at first use and kept. Without torch's headers that takes seconds."""

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
# Not -ffast-math: whether a value is a number must stay visible.
_FLAGS = [
    *("-std=c++17", "-O3", "-march=native", "-mprefer-vector-width=512", "-fopenmp", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
]
_TRIAL = Path(__file__).with_name("trial.py")
_SECONDS = 120.0
_ONE_AT_A_TIME = threading.Lock()


class _FaultError(Exception):
    """The library compiles, but dies when it is run."""


def native() -> ctypes.CDLL | None:
    """Return our kernels, or None where they cannot be compiled or run: then torch's and FBGEMM's own do the work.

    A second thread waits for the first.
    """
    with _ONE_AT_A_TIME:
        return _compiled_or_none()


@cache
def _compiled_or_none() -> ctypes.CDLL | None:
    compiler = cxx_compiler()
    problem = f"no C++ compiler (CXX, {', '.join(COMPILERS)})"
    remedy = "Install g++ (Debian: apt-get install g++)"
    if compiler:
        try:
            return _declared(ctypes.CDLL(str(_compiled(compiler))))
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
    """Return the library, compiled now if need be. What is kept has been run once: see `trial`."""
    source = b"".join(path.read_bytes() for path in [*_SOURCES, *_HEADERS])
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=_SECONDS).stdout
    facts = [source, _TRIAL.read_bytes(), version, instruction_sets(), " ".join([compiler, *_FLAGS]).encode()]
    name = f"kernels-{hashlib.sha256(b'|'.join(facts)).hexdigest()[:16]}.so"
    folder = cache_folder() or Path(tempfile.mkdtemp(prefix="recmill-"))  # compiled in each process then
    kept = folder / name
    refused = kept.with_suffix(".txt")  # why a library that compiles cannot be used here
    if refused.is_file():
        raise _FaultError(refused.read_text(encoding="utf-8"))
    if not kept.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / name
            command = [compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(made)]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
            if fault := _fault(made):
                refused.write_text(fault, encoding="utf-8")
                raise _FaultError(fault)
            os.replace(made, kept)  # atomic, also when several processes compile at once
    return kept


def _fault(library: Path) -> str | None:
    """Run kernels of a new library in a child process; return what it died of, if it did.

    A hypervisor may fault on an instruction that the CPU lists, and for which the compiler therefore made code.
    """
    command = [sys.executable, "-P", "-m", "recmill.kernels.trial", str(library)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except subprocess.CalledProcessError as error:
        if -error.returncode not in FAULTS:
            raise
        name = signal.Signals(-error.returncode).name
        return f"a trial run was killed by {name}: this CPU, or its hypervisor, lacks an instruction that it lists"
    return None


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
