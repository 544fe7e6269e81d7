"""Our lookups against FBGEMM's, on the same groups of tables."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from recmill.config.sections import TablesOptim
from recmill.kernels.library import KernelLibrary, load_library
from recmill.tables.native_lookup import RowKernels, fused_lookup
from recmill.tables.optimizers import OPTIMIZERS as OPTIMIZERS_OF_TABLES
from recmill.tables.replicated import ReplicatedTables
from recmill.tables.table_lookup import TableLookup
from recmill.tables.torchrec_internals import FusedTables, adam_on_cpu


@pytest.fixture
def library() -> KernelLibrary:
    found = load_library()
    assert found is not None, "the tests need a C++ compiler"
    return found


SETTINGS = {
    EmbOptimType.EXACT_SGD: TablesOptim(name="sgd"),
    EmbOptimType.EXACT_ADAGRAD: TablesOptim(name="adagrad", eps=1e-6),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: TablesOptim(name="rowwise_adagrad", eps=1e-6),
}


def ours(group: SplitTableBatchedEmbeddingBagsCodegen, library: KernelLibrary | None) -> TableLookup:
    """The group, looked up with our kernels."""
    kernel = fused_lookup(FusedTables(group), RowKernels(SETTINGS[group.optimizer], library), are_bags=True)
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
    )
    group.weights_host.data.fill_(1.0)
    out = ours(group, library)(torch.tensor([2, 2, 2]), torch.tensor([0, 2, 3]))
    assert out.tolist() == [[2.0] * 4 + [1.0] * 4]
    out.backward(torch.tensor([[1.0] * 4 + [3.0] * 4]))
    assert group.weights_host.view(4, 4)[:, 0].tolist() == pytest.approx([1.0, 1.0, 0.5, 1.0])
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
    assert fused_lookup(FusedTables(group), RowKernels(TablesOptim(name="sgd"), library), are_bags=True) is None


def test_a_table_without_rows_and_bags_without_ids_are_no_trouble(library: KernelLibrary) -> None:
    """A rank may hold none of a table's rows."""
    specs = [(rows, 4, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in (0, 5)]
    group = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=EmbOptimType.EXACT_SGD, learning_rate=1.0)
    group.weights_host.data.fill_(2.0)
    out = ours(group, library)(torch.tensor([3, 3]), torch.tensor([0, 0, 0, 0, 2]))
    assert out.tolist() == [[0.0] * 8, [0.0] * 4 + [4.0] * 4]
    out.sum().backward()
    assert group.weights_host.view(5, 4)[:, 0].tolist() == [2.0, 2.0, 2.0, 0.0, 2.0]


RARE = 1e-3  # an eps at which its place in Adam's formula shows


def adam_tables(dim: int = 4) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Tables of 3, 1 and 9 rows; the last has two features."""
    with adam_on_cpu():
        group = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in (3, 1, 9)],
            feature_table_map=[0, 1, 2, 2],
            optimizer=EmbOptimType.ADAM,
            learning_rate=0.1,
        )
    group.weights_host.data.copy_(torch.linspace(-1, 1, 13 * dim))
    return group


ADAM_BATCHES = [  # ids of the 4 features in 2 samples; row 0 of the last table is looked up once, in the first batch
    ([0, 2, 2, 0, 8, 0, 1, 8, 8], [0, 1, 3, 3, 4, 5, 7, 8, 9]),
    ([1, 0, 0, 3, 3, 7], [0, 1, 1, 2, 3, 4, 4, 5, 6]),
    ([2, 0, 0, 8, 2, 1], [0, 1, 2, 3, 3, 4, 4, 5, 6]),
]


def sparse_adam(dim: int, are_bags: bool, eps: float) -> tuple[Tensor, list[Tensor]]:
    """The rows after ADAM_BATCHES in plain torch, one table per optimizer; and what was looked up."""
    tables = torch.linspace(-1, 1, 13 * dim).view(13, dim).split([3, 1, 9])
    modules = [nn.EmbeddingBag.from_pretrained(t.clone(), freeze=False, mode="sum", sparse=True) for t in tables]
    optimizer = torch.optim.SparseAdam([module.weight for module in modules], lr=0.1, eps=eps)
    outputs = []
    for ids, offsets in ADAM_BATCHES:
        out = []
        for feature, table in enumerate([0, 1, 2, 2]):
            edges = offsets[2 * feature : 2 * feature + 3]
            own = torch.tensor(ids[edges[0] : edges[2]], dtype=torch.int64)
            starts = torch.tensor(edges[:2]) - edges[0] if are_bags else torch.arange(len(own))
            out.append(modules[table](own, starts))
        outputs.append(torch.cat(out, dim=1 if are_bags else 0))
        optimizer.zero_grad()
        (outputs[-1] * upstream(outputs[-1])).sum().backward()
        optimizer.step()
    return torch.cat([module.weight.detach() for module in modules]), [out.detach() for out in outputs]


def upstream(values: Tensor) -> Tensor:
    return (torch.arange(values.numel()) % 7 - 2.6).view_as(values)  # sums that are rounding only would give full steps


@pytest.mark.parametrize("kernels", ["ours", "torch"])
@pytest.mark.parametrize("are_bags", [True, False], ids=["bags", "sequences"])
@pytest.mark.parametrize("dim", [4, 20])
def test_adam_equals_torch_s_sparse_adam(library: KernelLibrary, kernels: str, are_bags: bool, dim: int) -> None:
    """Bias is corrected by the number of all steps; the means of rows that are not looked up stay as they are."""
    group = adam_tables(dim)
    settings = RowKernels(TablesOptim(name="adam", eps=1e-12), library if kernels == "ours" else None)
    kernel = fused_lookup(FusedTables(group), settings, are_bags)
    assert kernel is not None
    lookup = TableLookup(group, [], kernel)
    rows, outputs = sparse_adam(dim, are_bags, eps=1e-12)
    for step, (ids, offsets) in enumerate(ADAM_BATCHES):
        lookup.steps = torch.tensor(float(step))
        with torch.no_grad():  # an evaluation is no step
            lookup(torch.tensor(ids), torch.tensor(offsets))
        found = lookup(torch.tensor(ids), torch.tensor(offsets))
        torch.testing.assert_close(found, outputs[step], rtol=1e-5, atol=1e-6)
        found.backward(upstream(found))
    torch.testing.assert_close(group.weights_host.detach().view(-1, dim), rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernels", ["ours", "torch"])
def test_adam_of_rows_in_every_batch_is_torch_s_dense_adam_with_any_eps(library: KernelLibrary, kernels: str) -> None:
    group = adam_tables()
    settings = RowKernels(TablesOptim(name="adam", eps=RARE), library if kernels == "ours" else None)
    kernel = fused_lookup(FusedTables(group), settings, are_bags=False)
    assert kernel is not None
    weight = nn.Parameter(group.weights_host.detach().clone().view(13, 4))
    adam = torch.optim.Adam([weight], lr=0.1, eps=RARE)
    ids, offsets = torch.tensor([0, 1, 2, 0, *range(9)]), torch.tensor([0, 3, 4, 13, 13])
    for step in range(3):
        group.iter_cpu.fill_(step)
        for values in (weight, kernel(ids, offsets)):
            values.backward(1e-3 * upstream(values) * (step + 1))
        adam.step()
        adam.zero_grad()
    torch.testing.assert_close(group.weights_host.detach().view(13, 4), weight.detach(), rtol=1e-5, atol=1e-6)


def test_the_first_two_steps_of_adam_by_hand(library: KernelLibrary) -> None:
    """Gradients 2 and -1: means 0.2 and 0.08, of squares 0.004 and 0.004996; corrected 2 and 0.08 / 0.19, 4 and
    0.004996 / 0.001999. The first step is the learning rate, the second 0.1 * 0.421053 / 1.580897.
    """
    group = adam_tables()
    kernel = fused_lookup(FusedTables(group), RowKernels(TablesOptim(name="adam"), library), are_bags=False)
    assert kernel is not None
    weights = group.weights_host.detach()
    first = float(weights[0])
    found = []
    for step, gradient in enumerate([2.0, -1.0]):
        group.iter_cpu.fill_(step)
        out = kernel(torch.tensor([0]), torch.tensor([0, 1, 1, 1, 1]))
        out.backward(torch.full_like(out, gradient))
        found.append(float(weights[0]) - first)
    assert found == pytest.approx([-0.1, -0.1 - 0.0266338], rel=1e-5)
    assert [group.momentum1_host[0].item(), group.momentum2_host[0].item()] == pytest.approx([0.08, 0.004996])
    assert not group.momentum1_host[4:].any()


FTRL = {"lambda1": 0.4, "lambda2": 0.5, "beta": 0.3, "initial_accumulator": 0.2}
DECAYED: list[dict[str, Any]] = [
    {"name": "sgd", "weight_decay": 0.5},
    {"name": "adagrad", "weight_decay": 0.5},
    {"name": "rowwise_adagrad", "weight_decay": 0.5},
    {"name": "adam", "weight_decay": 0.5},
    {"name": "ftrl"},
    *({"name": name, "l2": 0.3} for name in ("sgd", "adagrad", "rowwise_adagrad", "adam")),
    {"name": "adagrad", "weight_decay": 0.5, "l2": 0.3},
    {"name": "ftrl", "weight_decay": 0.5} | FTRL,
]


def row_after(options: dict[str, Any], row: np.ndarray, gradients: list[np.ndarray], rate: float) -> np.ndarray:
    """One row after steps with these gradients, in NumPy and float64. Weight decay takes rate * decay * row."""
    name, decay = options["name"], options.get("weight_decay", 0.0)
    state = np.zeros((2, len(row)))
    for step, g in enumerate(gradients, start=1):
        before = row
        g = g + options.get("l2", 0.0) * row  # the gradient of l2 / 2 * |row|^2
        if name == "sgd":
            row = row - rate * g
        elif name in ("adagrad", "rowwise_adagrad"):
            state[0] += g**2 if name == "adagrad" else np.mean(g**2)
            row = row - rate * g / (np.sqrt(state[0]) + 1e-8)
        elif name == "adam":
            state[0] = 0.9 * state[0] + 0.1 * g
            state[1] = 0.999 * state[1] + 0.001 * g**2
            row = row - rate * state[0] / (1 - 0.9**step) / (np.sqrt(state[1] / (1 - 0.999**step)) + 1e-8)
        else:  # as OneFlow's documentation has it
            first, lambda1 = options.get("initial_accumulator", 0.1), options.get("lambda1", 0.0)
            sigma = (np.sqrt(first + state[1] + g**2) - np.sqrt(first + state[1])) / rate
            state[1] += g**2
            state[0] += g - sigma * row
            scale = (options.get("beta", 0.0) + np.sqrt(first + state[1])) / rate + options.get("lambda2", 0.0)
            row = -(state[0] - np.sign(state[0]) * lambda1) / scale
            row, before = (np.where(np.abs(state[0]) < lambda1, 0, values) for values in (row, before))
        row = row - rate * decay * before
    return row


@pytest.mark.parametrize("kernels", ["ours", "torch", "replicated"])
@pytest.mark.parametrize("options", DECAYED, ids=lambda options: " ".join(map(str, options.values())))
def test_weight_decay_l2_and_ftrl_do_to_the_rows_of_a_batch_what_numpy_does(
    library: KernelLibrary, kernels: str, options: dict[str, Any]
) -> None:
    """Row 1 is looked up in every batch, once twice; row 2 in the last one; row 0 never, and does not decay."""
    settings = TablesOptim(**options)
    optimizer = OPTIMIZERS_OF_TABLES[settings.name]
    spec = (3, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)
    with adam_on_cpu() if optimizer.fbgemm_type == EmbOptimType.ADAM else nullcontext():
        group = SplitTableBatchedEmbeddingBagsCodegen([spec], optimizer=optimizer.fbgemm_type, learning_rate=0.1)
    first = torch.linspace(-1, 1, 24)
    group.weights_host.data.copy_(first)
    weight = nn.Parameter(first.clone().view(3, 8))
    replicated = ReplicatedTables({"x.embeddings.t.weight": weight}, settings.model_copy(update={"lr": 0.1}))
    used = RowKernels(settings, library if kernels == "ours" else None)
    kernel = fused_lookup(FusedTables(group), used, are_bags=False)
    assert kernel is not None
    gradients: dict[int, list[np.ndarray]] = {1: [], 2: []}
    for step, ids in enumerate([[1, 1], [1], [1, 2]]):
        group.iter_cpu.fill_(step)
        replicated.zero_grad()
        looked_up = (
            weight[torch.tensor(ids)]
            if kernels == "replicated"
            else kernel(torch.tensor(ids), torch.tensor([0, len(ids)]))
        )
        given = (upstream(looked_up) + step).detach()
        looked_up.backward(given)
        if kernels == "replicated":
            replicated.step()
        for row in set(ids):
            gradients[row].append(given[torch.tensor(ids) == row].sum(0).double().numpy())
    found = weight.detach() if kernels == "replicated" else group.weights_host.detach().view(3, 8)
    assert torch.equal(found[0], first[:8])
    at_first = first.double().view(3, 8).numpy()
    expected = row_after(options, at_first[1], gradients[1], 0.1)
    np.testing.assert_allclose(found[1], expected, rtol=2e-5, atol=2e-6)
    if settings.name != "adam":  # whose bias correction counts all steps
        np.testing.assert_allclose(found[2], row_after(options, at_first[2], gradients[2], 0.1), rtol=2e-5, atol=2e-6)


def test_the_first_step_of_ftrl_by_hand(library: KernelLibrary) -> None:
    """Accumulator 0.09 + 0.4 ** 2 = 0.5 ** 2, sigma (0.5 - 0.3) / 0.1 = 2, z 0.4 - 2 * -1 = 2.4, then
    -(2.4 - 0.4) / (0.5 / 0.1 + 5) = -0.2.
    """
    with adam_on_cpu():
        group = SplitTableBatchedEmbeddingBagsCodegen(
            [(1, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=EmbOptimType.ADAM, learning_rate=0.1
        )
    group.weights_host.data.fill_(-1.0)
    settings = TablesOptim(name="ftrl", lambda1=0.4, lambda2=5.0, initial_accumulator=0.09)
    kernel = fused_lookup(FusedTables(group), RowKernels(settings, library), are_bags=False)
    assert kernel is not None
    out = kernel(torch.tensor([0]), torch.tensor([0, 1]))
    out.backward(torch.full_like(out, 0.4))
    assert group.weights_host.tolist() == pytest.approx([-0.2] * 4)


@pytest.mark.parametrize("bad", [-1, 1])
def test_an_id_outside_its_table_is_an_error_in_sequences_too(library: KernelLibrary, bad: int) -> None:
    kernel = fused_lookup(FusedTables(adam_tables()), RowKernels(TablesOptim(name="adam"), library), are_bags=False)
    assert kernel is not None
    with pytest.raises(IndexError, match=f"id {bad} at position 2 of 3"):
        kernel(torch.tensor([0, 2, bad]), torch.tensor([0, 2, 3, 3, 3]))
