"""The facts about each optimizer of tables; that they update rows as FBGEMM does is in test_replicated.py."""

from typing import get_args

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from recmill.config.sections import TablesOptim
from recmill.tables.optimizers import OPTIMIZERS


def test_the_config_offers_exactly_the_optimizers_that_there_are() -> None:
    assert set(get_args(TablesOptim.model_fields["name"].annotation)) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", [name for name, optimizer in OPTIMIZERS.items() if "cpu" in optimizer.is_in_fbgemm])
def test_states_have_the_shapes_of_fbgemm_s(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    spec = (7, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)
    group = SplitTableBatchedEmbeddingBagsCodegen([spec], optimizer=optimizer.fbgemm_type)
    theirs = [value for states in group.get_optimizer_state() for value in states.values()]
    ours = optimizer.new_state(torch.zeros(7, 4))
    assert [value.shape for value in ours.values()] == [value.shape for value in theirs]
    assert optimizer.state_values(7, 4) == sum(value.numel() for value in theirs)


def test_adam_s_state_is_two_values_for_each_of_the_table_s() -> None:
    state = OPTIMIZERS["adam"].new_state(torch.zeros(7, 4))
    assert {name: list(value.shape) for name, value in state.items()} == {
        "momentum1": [7, 4],
        "exp_avg_sq": [7, 4],
        "steps": [],
    }
    assert OPTIMIZERS["adam"].state_values(7, 4) == 56
