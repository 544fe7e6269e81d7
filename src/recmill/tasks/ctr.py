"""Click-through rate: binary cross-entropy; AUROC, log loss, normalized entropy and calibration."""

from collections.abc import Callable

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from recmill.batch import CtrBatch
from recmill.config.sections import EvalSection
from recmill.errors import UserError
from recmill.metrics.binary import BinaryMetrics, Values
from recmill.registry import own_metrics


def loss_sum(network: Callable[..., Tensor], batch: CtrBatch) -> Tensor:
    logits_B = _checked(network(*batch.inputs()), batch)
    return F.binary_cross_entropy_with_logits(logits_B, batch.labels_B, weight=batch.weights_B, reduction="sum")


def new_metrics(section: EvalSection, resamples: int = 0, negatives: float = 1.0) -> BinaryMetrics:
    """Create metrics; `resamples` of the rows give intervals. `negatives`: see `corrected_logits`."""
    return BinaryMetrics(own_metrics(section.metrics), resamples, negatives)


def headline(values: Values) -> str:
    return "auroc"


def update(metrics: BinaryMetrics, logits_B: Tensor, batch: CtrBatch) -> None:
    logits_B = _checked(logits_B, batch)
    is_real = (batch.weights_B > 0).cpu().numpy()  # selecting on a GPU would make the host wait for it

    def real(column: Tensor) -> np.ndarray:
        return column.cpu().numpy()[is_real]

    groups, numbers = (None if column is None else real(column) for column in (batch.groups_B, batch.numbers_B))
    metrics.update(real(logits_B), real(batch.labels_B), real(batch.weights_B), groups, numbers)


def _checked(outputs: object, batch: CtrBatch) -> Tensor:
    """Return what a network gave for the batch, or raise if it is not one logit per row."""
    if isinstance(outputs, Tensor) and outputs.shape == batch.labels_B.shape:
        return outputs
    given = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
    raise UserError(
        f"The model's forward() must return one logit per row: shape {list(batch.labels_B.shape)} for this batch. It "
        f"returned {given}."
    )
