"""Our lookups against FBGEMM's, on the same groups of tables."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from recmill.kernels.library import KernelLibrary, load_library
from recmill.tables.native_lookup import native_lookup
from recmill.tables.table_lookup import TableLookup
from recmill.tables.torchrec_internals import FusedTables


@pytest.fixture
def library() -> KernelLibrary:
    found = load_library()
    assert found is not None, "the tests need a C++ compiler"
    return found


def ours(group: SplitTableBatchedEmbeddingBagsCodegen, library: KernelLibrary) -> TableLookup:
    """The group, looked up with our kernels."""
    kernel = native_lookup(FusedTables(group), library)
    assert kernel is not None
    return TableLookup(group, [], kernel)


ROWS = [1, 7, 5000, 3]
OPTIMIZERS = [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]


SHARED = [0, 1, 1, 2, 2, 2, 3]  # the table of each feature


def tables(
    optimizer: EmbOptimType, dim: int = 20, tables_of_features: list[int] | None = None
) -> SplitTableBatchedEmbeddingBagsCodegen:
    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS],
        feature_table_map=tables_of_features,
        optimizer=optimizer,
        learning_rate=0.1,
        eps=1e-6,
    )
    torch.manual_seed(3)
    made.weights_host.data.normal_()
    return made


def lookups(batch: int, step: int, tables_of_features: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Bags of 0 to 3 ids; in small tables nearly all are there several times."""
    torch.manual_seed(100 + step)
    rows_of_features = [ROWS[table] for table in tables_of_features or range(len(ROWS))]
    lengths = torch.randint(0, 4, (len(rows_of_features) * batch,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    counts = lengths.view(len(rows_of_features), batch).sum(1).tolist()
    return torch.cat([torch.randint(0, rows, (n,)) for rows, n in zip(rows_of_features, counts, strict=True)]), offsets


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shared", [None, SHARED], ids=["", "shared"])
def test_tables_learn_what_fbgemms_do(
    library: KernelLibrary, optimizer: EmbOptimType, threads: int, shared: list[int] | None
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        theirs, group = (tables(optimizer, tables_of_features=shared) for _ in range(2))
        lookup = ours(group, library)
        for step in range(4):
            ids, offsets = lookups(33, step, shared)
            for module in (theirs, group):
                module.set_learning_rate(0.1 / (step + 1))
            expected, found = theirs(ids, offsets), lookup(ids, offsets)
            torch.testing.assert_close(found, expected)
            torch.manual_seed(step)
            upstream = torch.randn(*expected.shape[::-1]).t()
            expected.backward(upstream)
            found.backward(upstream)
        torch.testing.assert_close(group.weights_host, theirs.weights_host)
        if optimizer != EmbOptimType.EXACT_SGD:
            torch.testing.assert_close(group.momentum1_host, theirs.momentum1_host)
    finally:
        torch.set_num_threads(before)


def test_more_threads_change_no_bit_of_the_tables(library: KernelLibrary) -> None:
    def trained(threads: int) -> Tensor:
        torch.set_num_threads(threads)
        group = tables(EmbOptimType.EXACT_ADAGRAD)
        ids, offsets = lookups(batch=500, step=0)
        out = ours(group, library)(ids, offsets)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        return group.weights_host.detach().clone()

    before = torch.get_num_threads()
    try:
        assert torch.equal(trained(1), trained(3))
    finally:
        torch.set_num_threads(before)


def test_the_gradient_of_a_shared_row_is_the_sum_over_its_features(library: KernelLibrary) -> None:
    """Adagrad by hand: row 2 has the gradient 1 twice (first feature) and 3 (second): 5, whose square is 25."""
    group = SplitTableBatchedEmbeddingBagsCodegen(
        [(4, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        feature_table_map=[0, 0],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=0.5,
        eps=0.0,
    )
    group.weights_host.data.fill_(1.0)
    out = ours(group, library)(torch.tensor([2, 2, 2]), torch.tensor([0, 2, 3]))
    assert out.tolist() == [[2.0] * 4 + [1.0] * 4]
    out.backward(torch.tensor([[1.0] * 4 + [3.0] * 4]))
    assert group.weights_host.view(4, 4)[:, 0].tolist() == [1.0, 1.0, 0.5, 1.0]
    assert group.momentum1_host.view(4, 4)[:, 0].tolist() == [0.0, 0.0, 25.0, 0.0]


@pytest.mark.parametrize("bad", [-1, 7, 2**40])
def test_an_id_outside_its_table_is_an_error(library: KernelLibrary, bad: int) -> None:
    lookup = ours(tables(EmbOptimType.EXACT_SGD), library)
    ids, offsets = torch.tensor([0, bad, 4, 2]), torch.arange(5)
    with pytest.raises(IndexError, match=f"id {bad} at position 1 of 4"):
        lookup(ids, offsets)


def test_tables_of_two_widths_stay_with_fbgemm(library: KernelLibrary) -> None:
    specs = [(5, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for dim in (8, 16)]
    group = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=EmbOptimType.EXACT_SGD)
    assert native_lookup(FusedTables(group), library) is None


def test_a_table_without_rows_and_bags_without_ids_are_no_trouble(library: KernelLibrary) -> None:
    """A rank may hold none of a table's rows."""
    specs = [(rows, 4, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in (0, 5)]
    group = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=EmbOptimType.EXACT_SGD, learning_rate=1.0)
    group.weights_host.data.fill_(2.0)
    out = ours(group, library)(torch.tensor([3, 3]), torch.tensor([0, 0, 0, 0, 2]))
    assert out.tolist() == [[0.0] * 8, [0.0] * 4 + [4.0] * 4]
    out.sum().backward()
    assert group.weights_host.view(5, 4)[:, 0].tolist() == [2.0, 2.0, 2.0, 0.0, 2.0]
