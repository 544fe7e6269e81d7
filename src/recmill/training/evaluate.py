"""Exact evaluation of a split: every sample exactly once, metrics from sums over all ranks."""

import torch

from recmill.failpoints import reach
from recmill.metrics.binary import Values
from recmill.observe.progress import Progress
from recmill.protocols import Metrics
from recmill.training.parts import Parts
from recmill.training.prefetch import pinned, prefetched


@torch.no_grad()
def evaluate_split(parts: Parts, split: str, metrics: Metrics) -> Values:
    """Update `metrics`, which must be new, and return its values. All ranks take part and get the same values."""
    model, task, source, world = parts.model, parts.task, parts.source, parts.world
    was_training = model.training
    model.eval()
    progress = Progress(f"evaluating {split}", source.num_eval_batches(split), unit="batches", world=world)
    pinned_batches = pinned(source.eval_batches(split), world.device)
    with progress, prefetched(pinned_batches, parts.prefetch) as batches:
        for batch in batches:
            parts.heartbeat.beat(f"evaluating {split}")
            reach("eval.batch")
            on_device = batch.to(world.device, non_blocking=True)
            task.update(metrics, model(*on_device.inputs()), on_device)
            progress.advance(1)
    model.train(was_training)
    return metrics.compute(world)
