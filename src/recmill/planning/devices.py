"""Facts about the devices that a run may be planned for: built-in ones, or a TOML file with measured values."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from recmill import registry
from recmill.config.problems import validated
from recmill.config.sections import Section, key
from recmill.errors import ConfigError, did_you_mean_path
from recmill.files.reading import read_small
from recmill.hardware.cpu import num_cores
from recmill.hardware.memory import memory_bytes


class Device(Section):
    """What a process computes with: a GPU, or its share of the cores of a machine, whose rates are for all of them."""

    kind: Literal["cpu", "cuda"] = key(..., "cpu or cuda.")
    source: str = key("", "Where the numbers are from.")
    memory_gb: PositiveFloat = key(..., "Memory of a GPU; cpu: of a machine.")
    cores: PositiveInt = key(1, "Cores of a machine (cpu).")
    gemm_gflops: PositiveFloat = key(..., "Matrix products in float32, in GFLOP/s.")
    tf32_gflops: NonNegativeFloat = key(0.0, "The same with train.tf32; 0: no faster.")
    half_gflops: NonNegativeFloat = key(0.0, "The same with a train.precision of 16 bits; 0: no faster.")
    memory_gb_per_s: PositiveFloat = key(..., "Reading and writing the values between layers.")
    row_gb_per_s: PositiveFloat = key(..., "Reading and updating the values of table rows.")
    row_ns: NonNegativeFloat = key(0.0, "Each looked-up row, with its update.")
    row_min_bytes: NonNegativeFloat = key(0.0, "Bytes that are read even of a narrower row.")
    call_us: NonNegativeFloat = key(0.0, "Each layer and each table.")
    step_ms: NonNegativeFloat = key(0.0, "Each step, whatever its size; cuda: of the host, while the GPU computes.")
    several: PositiveFloat = key(1.0, "Speed of several processes on the cores, relative to one process (cpu).")
    link_gb_per_s: PositiveFloat = key(..., "Exchange within a machine: each GPU and direction; cpu: all processes.")
    link_us: NonNegativeFloat = key(0.0, "Each exchange within a machine.")
    network_gb_per_s: PositiveFloat = key(..., "Exchange between machines: each GPU and direction; cpu: a machine.")
    network_us: NonNegativeFloat = key(0.0, "Each message to a process on another machine.")
    disk_gb_per_s: PositiveFloat = key(..., "Writing checkpoints: a machine.")
    copy_gb_per_s: PositiveFloat = key(10.0, "Copying rows to host memory for a checkpoint: a process.")


@dataclass(frozen=True)
class Site:
    """The machines that a run is planned for."""

    nodes: int
    procs: int  # per machine
    device: Device

    @property
    def size(self) -> int:
        return self.nodes * self.procs


# Datasheets of NVIDIA (A100 SXM 40 GB, H100 SXM 80 GB: dense rates) and of AWS (p4d, p5: 400 and 3,200 Gbit/s for 8
# GPUs), times 0.7, a round share that programs reach. A step takes the host 7.2 ms: MLCommons' 284,615 records/s with
# batches of 2,048, which are too small to keep a GPU busy. The times of exchanges and the rate of the disk are assumed.
_REACHED = 0.7


def _gpu(memory_gb: float, tf32: float, half: float, gemm: float, memory: float, link: float, network: float) -> Device:
    return Device(
        kind="cuda",
        source="datasheets x 0.7",
        memory_gb=memory_gb,
        gemm_gflops=_REACHED * gemm,
        tf32_gflops=_REACHED * tf32,
        half_gflops=_REACHED * half,
        memory_gb_per_s=_REACHED * memory,
        row_gb_per_s=_REACHED * memory,
        link_gb_per_s=_REACHED * link,
        network_gb_per_s=_REACHED * network,
        disk_gb_per_s=2.0,
        step_ms=7.2,
        link_us=30.0,
        network_us=10.0,
        row_min_bytes=64.0,
    )


DEVICES = {
    "a100-40gb": _gpu(40, gemm=19_500, tf32=156_000, half=312_000, memory=1_555, link=300, network=6.25),
    "h100-80gb": _gpu(80, gemm=67_000, tf32=494_000, half=989_000, memory=3_350, link=450, network=50),
}
# Two cores of a shared AMD EPYC, by `recmill plan --calibrate`; the network and the time of a message are assumed.
CPU = Device(
    kind="cpu",
    source="measured on two cores",
    memory_gb=1.0,
    gemm_gflops=187.0,
    memory_gb_per_s=20.1,
    row_gb_per_s=36.8,
    row_ns=15.8,
    call_us=89.0,
    step_ms=0.56,
    several=1.13,
    link_gb_per_s=2.15,
    link_us=586.0,
    network_gb_per_s=1.25,
    network_us=50.0,
    disk_gb_per_s=1.7,
    cores=2,
)


def read_device(name: str) -> Device:
    """Return a device by its name, or that of a TOML file. 'cpu': this machine, with `CPU`'s rates for its cores."""
    if name == "cpu":
        speedup = num_cores() / CPU.cores
        scaled = ("gemm_gflops", "memory_gb_per_s", "row_gb_per_s", "link_gb_per_s")
        rates = {name: getattr(CPU, name) * speedup for name in scaled} | {"row_ns": CPU.row_ns / speedup}
        return CPU.model_copy(update={"memory_gb": memory_bytes() / 1e9, "cores": num_cores(), **rates})
    if name in DEVICES:
        return DEVICES[name]
    if not name.endswith(".toml"):
        fact = registry.unknown("device", name, ["cpu", *DEVICES])
        raise ConfigError(f"--device: {fact} Or give a file: recmill plan --calibrate FILE.toml writes one.")
    try:
        values = tomllib.loads(read_small(Path(name)).decode())
    except FileNotFoundError:
        remedy = f"{did_you_mean_path(name)}Write one: recmill plan --calibrate {name}."
        raise ConfigError(f"--device {name}: no such file. {remedy}") from None
    except ValueError as error:
        raise ConfigError(f"--device {name}: {error}. Use a TOML file like those of --calibrate.") from None
    device, problems = validated(Device, values)
    if problems:
        raise ConfigError("\n".join(f"--device {name}: {problem.text}" for problem in problems))
    return device
