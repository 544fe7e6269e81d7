from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.batch import CtrBatch
from recmill.config.sections import EvalSection
from recmill.errors import UserError
from recmill.tasks import ctr
from recmill.world import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def ctr_batch(labels: list[float], weights: list[float]) -> CtrBatch:
    nothing = KeyedJaggedTensor(keys=[], values=torch.empty(0), lengths=torch.empty(0, dtype=torch.int32))
    return CtrBatch(torch.zeros(len(labels), 1), nothing, torch.tensor(labels), torch.tensor(weights))


def test_click_loss_is_a_weighted_sum_that_ignores_fillers() -> None:
    """Probabilities .8, of weight 3, .25, of weight 1/2, and one that must not count: -3 log .8 - 1/2 log .75."""
    logits = torch.log(torch.tensor([0.8 / 0.2, 0.25 / 0.75, 0.9 / 0.1])).requires_grad_()
    batch = ctr_batch([1.0, 0.0, 0.0], [3.0, 0.5, 0.0])
    loss = ctr.loss_sum(lambda *inputs: logits, batch)
    assert loss.item() == pytest.approx(-3 * np.log(0.8) - 0.5 * np.log(0.75), rel=1e-6)
    assert batch.weight() == 3.5, "the loss of a step is the sum divided by this"
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([3 * (0.8 - 1), 0.5 * 0.25, 0.0], abs=1e-6)


def test_click_metrics_ignore_fillers() -> None:
    metrics = ctr.new_metrics(EvalSection())
    ctr.update(metrics, torch.tensor([2.0, -1.0, 9.0]), ctr_batch([1.0, 0.0, 0.0], [1.0, 1.0, 0.0]))
    values = metrics.compute(ALONE)
    assert (values["auroc"], values["rows"]) == (1.0, 2)


@pytest.mark.parametrize(
    ("outputs", "given"), [(torch.zeros(2, 1), r"shape \[2, 1\]"), ((torch.zeros(2), torch.zeros(2)), "tuple")]
)
def test_a_network_that_gives_no_logit_per_row_is_reported(outputs: Any, given: str) -> None:
    batch = ctr_batch([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(UserError, match=rf"must return one logit per row: shape \[2\].* It returned {given}\."):
        ctr.loss_sum(lambda *inputs: outputs, batch)
    with pytest.raises(UserError, match=given):
        ctr.update(ctr.new_metrics(EvalSection()), outputs, batch)
