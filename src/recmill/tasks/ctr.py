"""Click-through rate: binary cross-entropy; AUROC, log loss, normalised entropy, calibration."""

from torch import Tensor
from torch.nn import functional as F

from recmill.batch import CtrBatch
from recmill.config.sections import EvalSection
from recmill.metrics.binary import BinaryMetrics, Values


def loss_sum(logits_B: Tensor, batch: CtrBatch) -> Tensor:
    """Sum over this rank's rows; the caller divides by the weight of the whole global batch."""
    return F.binary_cross_entropy_with_logits(logits_B, batch.labels_B, weight=batch.weights_B, reduction="sum")


def new_metrics(section: EvalSection) -> BinaryMetrics:
    return BinaryMetrics()


def headline(values: Values) -> float | None:
    """What the best checkpoint is chosen by: higher is better."""
    return values["auroc"] if isinstance(values["auroc"], float) else None


def update(metrics: BinaryMetrics, logits_B: Tensor, batch: CtrBatch) -> None:
    real = batch.weights_B > 0
    metrics.update(logits_B[real].cpu().numpy(), batch.labels_B[real].cpu().numpy())
