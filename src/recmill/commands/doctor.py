"""`recmill doctor`: check the installation and the machine, and say how to fix what is wrong."""

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recmill.errors import UserError
from recmill.hardware.child import last_line, run_child
from recmill.hardware.cpu import COMPILERS, cpu_name, cxx_compiler, num_cores, threads_per_process
from recmill.hardware.memory import memory_bytes
from recmill.hardware.precision import Dtype, probe
from recmill.kernels import COST_WITHOUT
from recmill.launch.local import run_job
from recmill.observe.provenance import installed_version
from recmill.tables.pins import FBGEMM, TORCH, TORCHREC

if TYPE_CHECKING:
    from recmill.world import World

_MIN_MEMORY_GB = 2
_GOOD_READS = 20_000  # a second: what rows of width 128 need if a quarter of them is in memory
_MAX_SECONDS = 120.0  # importing the libraries from a slow disk takes most of it; NCCL may wait forever for a GPU
_FBGEMM_PROBE = """
import torch, fbgemm_gpu, torchrec
sums = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 2, 3]))
assert sums.tolist() == [0, 1, 3, 6], sums
if torch.cuda.is_available():
    names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    print(fbgemm_gpu.__variant__, *names, sep="\\n")
"""
# What sharded tables need on GPUs: an operation of FBGEMM on each, and an exchange among all of them.
_GPU_PROBES = {
    "FBGEMM on GPU": """
import torch, fbgemm_gpu
for gpu in range(torch.cuda.device_count()):
    sums = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 2, 3], device=f"cuda:{gpu}"))
    assert sums.tolist() == [0, 1, 3, 6], sums
print("works on", torch.cuda.device_count(), "GPU(s)")
""",
    "NCCL all-to-all": """
import torch
from recmill.launch.local import run_job
gpus = torch.cuda.device_count()
run_job("doctor", {"device": "cuda"}, procs=gpus)
print(".".join(map(str, torch.cuda.nccl.version())), "exchanged values among", gpus, "GPU(s)")
""",
}


@dataclass(frozen=True)
class Check:
    name: str
    found: str
    is_good: bool = True
    is_needed: bool = True  # training cannot work without it
    remedy: str = ""


def doctor() -> list[Check]:
    """Run every check, in the order of the printed table."""
    checks = [_python(), *_versions()]
    if all(check.is_good for check in checks):
        checks += _real_operations()
    return [*checks, _compiler(), *_hardware()]


def check_store(directory: str) -> list[Check]:
    """Measure the disk of `directory` as a store of cached tables reads it."""
    from recmill.tables.stores.disk_probe import measure_disk

    disk = measure_disk(Path(directory))
    has_ring = any(reads.engine == "io_uring" for reads in disk.reads)
    blocks = f"in blocks of {disk.alignment} bytes" if disk.is_direct else "refused"
    memory = "Rows also pass through the page cache. Use another file system, such as ext4 or xfs."
    threads = "Threads read instead, which takes more CPU time. Containers need a seccomp profile that allows it."
    slow = f"Steps may wait for this disk: cached tables make up to {_GOOD_READS:,} reads/s. Use a local SSD."
    rows = [
        Check(f"{reads.engine}, depth {reads.depth}", str(reads), reads.is_enough(_GOOD_READS), False, slow)
        for reads in disk.reads
    ]
    return [
        Check("file system", f"{disk.file_system or 'unknown'}, {disk.free_bytes / 1e9:,.1f} GB free"),
        Check("O_DIRECT", blocks, disk.is_direct, False, memory),
        Check("io_uring", "allowed" if has_ring else "refused", has_ring, False, threads),
        *rows,
    ]


def would_work(checks: list[Check]) -> bool:
    """Return whether all checks that training needs are good."""
    return all(check.is_good or not check.is_needed for check in checks)


def work(world: "World") -> bool:
    """Exchange numbers with the other processes, as sharded tables do; return whether our CPU kernels work."""
    from recmill.kernels.library import load_library

    received = world.exchange_numbers([10 * world.rank + to for to in range(world.size)], world.device)
    assert received == [10 * sender + world.rank for sender in range(world.size)], received
    return world.is_main and world.device.type == "cpu" and load_library() is not None


def fix_command() -> str:
    """Return the command that installs matching versions, for CUDA if its FBGEMM is installed, otherwise for CPU."""
    fbgemm = "fbgemm-gpu" if installed_version("fbgemm-gpu") else "fbgemm-gpu-cpu"
    return (
        f"pip install torch=={TORCH} {fbgemm}=={FBGEMM} tensordict torchmetrics==1.0.3 tqdm pyre-extensions "
        f"&& pip install --no-deps torchrec=={TORCHREC}"
    )


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", version, sys.version_info >= (3, 11), remedy="Use Python 3.11 or newer.")


def _versions() -> list[Check]:
    checks = [_version("torch", TORCH), _version("torchrec", TORCHREC)]
    cpu, cuda = installed_version("fbgemm-gpu-cpu"), installed_version("fbgemm-gpu")
    if cpu and cuda:
        found = f"fbgemm-gpu {cuda} and fbgemm-gpu-cpu {cpu} overwrite each other's files"
        remedy = (
            "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu "
            f"&& pip install fbgemm-gpu-cpu=={FBGEMM} (or fbgemm-gpu, for CUDA)"
        )
        return [*checks, Check("fbgemm", found, is_good=False, remedy=remedy)]
    return [*checks, _version("fbgemm-gpu" if cuda else "fbgemm-gpu-cpu", FBGEMM)]


def _version(package: str, expected: str) -> Check:
    found = installed_version(package) or "not installed"
    if found.split("+")[0] == expected:
        return Check(package, found)
    return Check(package, f"{found}, expected {expected}", is_good=False, remedy=fix_command())


def _real_operations() -> list[Check]:
    fbgemm = _probed("FBGEMM operation", _FBGEMM_PROBE)
    if not fbgemm.is_good:
        return [fbgemm]
    variant, *gpus = fbgemm.found.splitlines() or [""]
    kernels = []
    try:
        has_kernels = run_job("doctor", {"device": "cpu"}, procs=2)
        if cxx_compiler():
            found = "compiled and tried" if has_kernels else "cannot be used: see the warning above"
            remedy = f"Training works. {COST_WITHOUT}."
            kernels = [Check("CPU kernels", found, is_good=has_kernels, is_needed=False, remedy=remedy)]
        exchange = Check("gloo all-to-all", "2 processes exchanged values")
    except UserError as error:
        remedy = "Check that 127.0.0.1 is up and not firewalled: ip addr show lo"
        exchange = Check("gloo all-to-all", str(error), is_good=False, remedy=remedy)
    return [
        Check("FBGEMM operation", "works"),
        exchange,
        *kernels,
        *_gpus(gpus, variant),
        _precision("bfloat16"),
        _precision("float16"),
    ]


def _probed(name: str, code: str) -> Check:
    """Run `code` in a process of its own: libraries that do not match may kill it without an exception, or hang."""
    try:
        done = run_child([sys.executable, "-P", "-c", code], _MAX_SECONDS)
    except subprocess.TimeoutExpired:
        return Check(name, f"gives no result within {_MAX_SECONDS:g} s", is_good=False, remedy=fix_command())
    if done.returncode:
        return Check(name, last_line(done), is_good=False, remedy=fix_command())
    return Check(name, done.stdout.strip())


def _gpus(names: list[str], variant: str) -> list[Check]:
    """Check the GPUs that torch sees; `variant` of FBGEMM is 'cpu' or 'cuda'."""
    if not names:
        return [Check("GPU", "none: training runs on the CPU", is_needed=False)]
    counts = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
    gpus = Check("GPU", f"{counts}: at most {len(names)} process(es) on this machine")
    if variant == "cuda":
        return [gpus, *(_probed(name, code) for name, code in _GPU_PROBES.items())]
    found = "not possible, FBGEMM is built for CPU: training runs on the CPU"
    return [gpus, Check("FBGEMM on GPU", found, is_good=False, is_needed=False, remedy="make setup SETUP=cuda")]


def _precision(dtype: Dtype) -> Check:
    """Report how the CPU multiplies in this dtype. Where it fails or is slow, training uses float32."""
    finding = probe(dtype, threads_per_process(1))
    use = "train.precision can use it" if finding.is_faster else "training stays in float32"
    remedy = f"Use train.precision = 'float32' (training does, whatever is set), or a machine that has {dtype}."
    return Check(
        f"{dtype} on CPU", f"{finding}: {use}", is_good=finding.ratio is not None, is_needed=False, remedy=remedy
    )


def _compiler() -> Check:
    if path := cxx_compiler():
        return Check("C++ compiler", path)
    found = f"none (CXX, {', '.join(COMPILERS)}): Recmill's CPU kernels cannot be compiled. {COST_WITHOUT}"
    return Check("C++ compiler", found, is_good=False, is_needed=False, remedy="apt-get install g++")


def _hardware() -> list[Check]:
    gigabytes = memory_bytes() / 1e9
    remedy = f"Training needs {_MIN_MEMORY_GB} GB or more."
    return [
        Check("cores", f"{num_cores()} ({cpu_name()})"),
        Check("memory", f"{gigabytes:.1f} GB", gigabytes >= _MIN_MEMORY_GB, remedy=remedy),
    ]
