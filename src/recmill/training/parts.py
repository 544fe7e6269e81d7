"""What training and evaluation work on: a model, its task and its data, on this rank."""

from dataclasses import dataclass, field

from torch import nn

from recmill.launch.watchdog import Heartbeat
from recmill.observe.recorder import Recorder
from recmill.protocols import BatchSource, TaskModule
from recmill.world import World


@dataclass(frozen=True)
class Parts:
    model: nn.Module  # sharded
    task: TaskModule
    source: BatchSource
    world: World
    prefetch: int  # batches prepared ahead of their use; 0 uses no thread
    heartbeat: Heartbeat
    recorder: Recorder = field(default_factory=Recorder)
