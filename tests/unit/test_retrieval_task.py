import math

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill.batch import ItemBatch, RequestBatch, RetrievalBatch
from recmill.config.sections import EvalSection
from recmill.tasks import retrieval


def batch_of(answers: list[int], weights: list[float], log_inclusion: list[float]) -> RetrievalBatch:
    nothing = KeyedJaggedTensor(["f"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(1, dtype=torch.int32))
    tensors = torch.tensor(answers), torch.tensor(weights), torch.tensor(log_inclusion)
    return RetrievalBatch(torch.empty(0, 0), nothing, len(answers), *tensors)


def test_the_loss_is_the_corrected_cross_entropy_by_hand() -> None:
    """An item that is in a quarter of the batches counts four times; a filler counts nothing."""
    scores = torch.tensor([[1.0, 2.0], [0.5, -1.0], [9.0, 9.0]])
    batch = batch_of([0, 1, 0], [1.0, 2.0, 0.0], [math.log(0.25), 0.0])
    first = -math.log(4 * math.exp(1) / (4 * math.exp(1) + math.exp(2)))
    second = -math.log(math.exp(-1) / (4 * math.exp(0.5) + math.exp(-1)))
    assert retrieval.loss_sum(lambda *_: scores, batch).item() == pytest.approx(first + 2 * second, rel=1e-6)


def test_ranks_count_ties_and_nan_against_the_model_and_leave_fillers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = retrieval.new_metrics(EvalSection(ks=[1, 2]))
    monkeypatch.setattr(retrieval, "_ITEMS_AT_ONCE", 2)
    scores = torch.tensor([[3.0, 1.0, 2.0], [2.0, 2.0, 1.0], [np.nan, 1.0, 0.0], [5.0, 1.0, 1.0]])
    requests = batch_of([0, 0, 1, 0], [1.0, 1.0, 1.0, 0.0], [])
    for items in torch.eye(3).split(1):  # so that the vector of a request is its scores
        retrieval.update(metrics, items, ItemBatch(**vars(requests)))
    retrieval.update(metrics, scores, RequestBatch(**vars(requests)))
    values = metrics.compute(None)  # ranks 0, 1 and, as 0 * NaN is NaN, 2
    assert values["users"] == 3
    assert values["all/hr@1"] == pytest.approx(1 / 3)
    assert values["all/hr@2"] == pytest.approx(2 / 3)
    assert values["all/ndcg@2"] == pytest.approx((1 + 1 / math.log2(3)) / 3)
    assert retrieval.headline(values) == "all/ndcg@2"
