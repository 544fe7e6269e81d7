"""Forecast the time of a step from the work of the busiest rank and the facts about its device."""

from dataclasses import asdict, dataclass, replace

from recmill.config.sections import TrainSection
from recmill.observe.verdict import Hints, RankTimes, Verdict, verdict
from recmill.planning.devices import Device
from recmill.planning.work import Work
from recmill.tables.placement import Machines
from recmill.tables.spec import VALUE_BYTES

# How often a value passes through memory in a step. Of a layer: once in each of its three products. Of a row: the
# lookup reads it, the update reads and writes it, and reads its gradient.
LAYER_PASSES = 3
ROW_PASSES = 4
_VALIDATION_SPEED = 2.5  # times the samples per second of training: forward alone


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, which add up."""

    products: float  # of matrices
    values: float  # moving the inputs and outputs of layers
    lookups: float
    exchange: float
    overhead: float  # on GPUs: how long they wait for the host, which starts their kernels meanwhile

    @property
    def compute(self) -> float:
        return self.products + self.values + self.lookups

    @property
    def total(self) -> float:
        return self.compute + self.exchange + self.overhead

    def as_dict(self) -> dict[str, float]:
        return asdict(self) | {"total": self.total}


def step_time(work: Work, device: Device, machines: Machines, train: TrainSection) -> StepTime:
    """Forecast a step. On CPU, processes of a machine share its cores and links; each GPU has its own."""
    procs = machines.local_size if device.kind == "cpu" else 1
    slower = procs / device.several if procs > 1 else 1.0
    row_bytes = VALUE_BYTES * work.row_values
    if device.row_min_bytes:
        row_bytes = max(row_bytes, device.row_min_bytes * work.lookups)
    peers = machines.world_size - machines.local_size
    exchange = work.link_bytes * procs / (1e9 * device.link_gb_per_s) + 1e-6 * work.collectives * device.link_us
    exchange += work.network_bytes * procs / (1e9 * device.network_gb_per_s)
    exchange += 1e-6 * work.collectives * peers * device.network_us
    overhead = (1e-3 * device.step_ms + 1e-6 * work.calls * device.call_us) * max(1.0, procs / device.cores)
    step = StepTime(
        products=work.flops / (1e9 * _gflops(device, train)) * slower,
        values=VALUE_BYTES * LAYER_PASSES * work.values / (1e9 * device.memory_gb_per_s) * slower,
        lookups=(ROW_PASSES * row_bytes / (1e9 * device.row_gb_per_s) + 1e-9 * work.lookups * device.row_ns) * slower,
        exchange=exchange,
        overhead=overhead,
    )
    if device.kind == "cuda":  # which computes while the host starts the next kernels
        return replace(step, overhead=max(0.0, overhead - (step.compute + step.exchange)))
    return step


def _gflops(device: Device, train: TrainSection) -> float:
    if train.precision != "float32" and device.half_gflops:
        return device.half_gflops
    return (train.tf32 and device.tf32_gflops) or device.gemm_gflops


@dataclass(frozen=True)
class RunTime:
    """The seconds of a run in its steps, in checkpoints and in validations, and what limits it."""

    steps: int
    training: float
    saving: float
    validating: float
    verdict: Verdict

    @property
    def hours(self) -> float:
        return (self.training + self.saving + self.validating) / 3600


def run_time(step: StepTime, steps: int, saving: float, training_on_held_out: float, hints: Hints) -> RunTime:
    """Forecast a run. `saving`: seconds; `training_on_held_out`: what training on validated samples would take."""
    validating = training_on_held_out / _VALIDATION_SPEED
    parts = {
        "input": 0.0,  # batches are prepared in the background
        "sync": 0.0,
        "exchange": steps * step.exchange,
        "forward": steps * step.compute / 3,
        "backward": steps * step.compute * 2 / 3,
        "update": 0.0,
        "other": steps * step.overhead,
        "save": saving,
        "validate": validating,
    }
    times = RankTimes(0, "", steps, parts, {"seconds": sum(parts.values())})
    return RunTime(steps, steps * step.total, saving, validating, verdict([times], hints))
