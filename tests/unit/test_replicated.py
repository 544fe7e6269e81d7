"""The optimizer of data_parallel tables does what the fused ones do."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

from recmill.config.sections import TablesOptim
from recmill.tables.replicated import ReplicatedTables

ROWS, DIM, LR, EPS = 20, 8, 0.3, 1e-2  # an eps that shows


def steps() -> list[tuple[Tensor, Tensor]]:
    """(ids, gradient of each looked-up row); an id twice in a step, and row 19 never."""
    random = torch.Generator().manual_seed(3)
    ids = [torch.tensor([1, 4, 4, 0]), torch.tensor([4, 2]), torch.tensor([1, 1, 18])]
    return [(i, torch.randn(len(i), DIM, generator=random)) for i in ids]


def replicated(name: str, first: Tensor) -> tuple[Tensor, ReplicatedTables]:
    weight = nn.Parameter(first.clone())
    optimizer = ReplicatedTables({"tables.embedding_bags.t.weight": weight}, TablesOptim(name=name, lr=LR, eps=EPS))  # type: ignore[arg-type]
    for ids, grad in steps():
        optimizer.zero_grad()
        (weight[ids] * grad).sum().backward()
        optimizer.step()
    return weight.detach(), optimizer


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("sgd", EmbOptimType.EXACT_SGD),
        ("adagrad", EmbOptimType.EXACT_ADAGRAD),
        ("rowwise_adagrad", EmbOptimType.EXACT_ROWWISE_ADAGRAD),
    ],
)
def test_it_equals_fbgemm_s_fused_one(name: str, fused: EmbOptimType) -> None:
    first = torch.rand(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=fused, learning_rate=LR, eps=EPS
    )
    table.split_embedding_weights()[0].copy_(first)
    for ids, grad in steps():
        (table(ids, torch.arange(len(ids) + 1)) * grad).sum().backward()
    found, optimizer = replicated(name, first)
    torch.testing.assert_close(found, table.split_embedding_weights()[0], rtol=1e-6, atol=1e-7)
    states = list(optimizer.state_dict()["state"]["tables.embedding_bags.t.weight"].values())
    expected = [] if name == "sgd" else list(table.get_optimizer_state()[0].values())
    torch.testing.assert_close(states, expected, rtol=1e-6, atol=1e-7)


def test_adam_equals_torch_s_sparse_adam() -> None:
    first = torch.rand(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    weight = nn.Parameter(first.clone())
    other = torch.optim.SparseAdam([weight], lr=LR, eps=1e-12)
    for ids, grad in steps():
        other.zero_grad()
        weight.grad = torch.sparse_coo_tensor(ids[None], grad, weight.shape, check_invariants=True)
        other.step()
    mine = nn.Parameter(first.clone())
    optimizer = ReplicatedTables({"x.embeddings.t.weight": mine}, TablesOptim(name="adam", lr=LR, eps=1e-12))
    for ids, grad in steps():
        optimizer.zero_grad()
        (mine[ids] * grad).sum().backward()
        optimizer.step()
    torch.testing.assert_close(mine.detach(), weight.detach(), rtol=1e-5, atol=1e-6)
