"""Exact evaluation of a split: every sample once, sums over ranks."""

from types import ModuleType
from typing import Any

import torch
from torch import nn

from recmill.config.sections import Settings
from recmill.failpoints import reach
from recmill.launch.watchdog import beat
from recmill.metrics.binary import Values
from recmill.observe.progress import Progress
from recmill.training.prefetch import pinned, prefetched
from recmill.world import World


@torch.no_grad()
def evaluate_split(
    model: nn.Module, task: ModuleType, source: Any, split: str, metrics: Any, settings: Settings, world: World
) -> Values:
    """`metrics`: new ones of the task. All ranks take part and all get the same values."""
    was_training = model.training
    model.eval()
    progress = Progress(f"evaluating {split}", source.num_eval_batches(split), unit="batches", world=world)
    waiting = pinned(source.eval_batches(split), world.device)
    with progress, prefetched(waiting, settings.data.prefetch) as batches:
        for batch in batches:
            beat(f"evaluating {split}")
            reach("eval.batch")
            batch = batch.to(world.device, non_blocking=True)
            task.update(metrics, model(*batch.inputs()), batch)
            progress.advance(1)
    model.train(was_training)
    return metrics.compute(world)
