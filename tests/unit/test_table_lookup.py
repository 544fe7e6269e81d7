"""What our lookups do before and besides looking rows up; their kernels are in test_native_lookup.py."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from recmill.tables.table_lookup import TableLookup

IDS, OFFSETS = torch.tensor([3, 3, 0, 4]), torch.tensor([0, 2, 3, 4, 4])  # 2 bags of each of 2 tables


@pytest.fixture
def group() -> SplitTableBatchedEmbeddingBagsCodegen:
    specs = [(rows, 4, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in (4, 5)]
    return SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=EmbOptimType.EXACT_SGD, learning_rate=1.0)


def marked(lookup: list[tuple[tuple[str, int], Tensor]]) -> dict[tuple[str, int], list[int]]:
    return {shard: marks.nonzero().squeeze(1).tolist() for shard, marks in lookup}


def test_rows_are_marked_when_they_are_looked_up_in_training(group: SplitTableBatchedEmbeddingBagsCodegen) -> None:
    lookup = TableLookup(group, [("a", 0), ("b", 100)])
    first = lookup.mark_rows()
    with torch.no_grad():
        lookup(IDS, OFFSETS)
    assert marked(first) == {("a", 0): [], ("b", 100): []}
    lookup(IDS, OFFSETS)
    second = lookup.mark_rows()  # of another saver
    lookup(torch.tensor([1]), torch.tensor([0, 1, 1]))
    assert marked(first) == {("a", 0): [0, 1, 3], ("b", 100): [4]}
    assert marked(second) == {("a", 0): [1], ("b", 100): []}


def test_marking_comes_before_a_kernel_of_ours_whichever_was_set_first(
    group: SplitTableBatchedEmbeddingBagsCodegen,
) -> None:
    seen: list[list[int]] = []

    def kernel(ids: Tensor, offsets: Tensor) -> Tensor:
        seen.append(marks[0][1].nonzero().squeeze(1).tolist())
        return torch.zeros(2, 8)

    lookup = TableLookup(group, [("a", 0), ("b", 100)], kernel)
    marks = lookup.mark_rows()
    assert lookup(IDS, OFFSETS, per_sample_weights=None).sum() == 0
    assert seen == [[0, 3]]
    with pytest.raises(AssertionError, match="our kernels take plain ids"):
        lookup(IDS, OFFSETS, per_sample_weights=torch.ones(4))


def test_all_else_is_answered_by_fbgemm(group: SplitTableBatchedEmbeddingBagsCodegen) -> None:
    lookup = TableLookup(group, [])
    assert [weights.shape for weights in lookup.split_embedding_weights()] == [(4, 4), (5, 4)]
    assert torch.equal(lookup(IDS, OFFSETS), group(IDS, OFFSETS))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = lookup.no_such_name
