"""Features that share a table, tables of several widths, padding and means: the same run as plain torch.

For any number of processes, sharding and store.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recmill import rng
from recmill.commands.assemble import build_source, model_module, task_module
from recmill.config import load_config
from recmill.data.opening import open_dataset
from recmill.tables.stores.row_file import file_system

from ..checkpoints import newest, tensors_of
from ..group import evaluate, train
from .runs import learned, losses, metric_lines, prepared_clicks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Config = dict[str, Any]
STEPS = 6
FEATURES = {"C1": 5, "C2": 4000, "C3": 300, "C4": 4000}
WIDTHS = {"C1": 8, "C2": 16, "C3": 4}
PADDING = {"C2": 0, "C4": 0, "C3": 7}
MEAN = {"C3", "C4"}
OWNERS = {"C1": "C1", "C2": "C2", "C3": "C3", "C4": "C2"}
RATE = 0.3


@pytest.fixture(scope="module")
def random_clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_clicks(tmp_path_factory, FEATURES.values())


@pytest.fixture
def config(random_clicks: Path) -> Config:
    """C4 has the table of C2, and every row has two or three ids of most features, among them padding."""
    return {
        "data": {"path": str(random_clicks), "multi_hot": {"sizes": [1, 3, 2, 2]}},
        "model": {"name": "dcnv2", "embedding_dim": 8, "bottom_mlp": [8], "top_mlp": [8], "cross_rank": 4}
        | {"share_tables": {"C4": "C2"}, "padding_ids": {"C2": 0, "C3": 7}, "pooling": {"C3": "mean", "C4": "mean"}}
        | {"embedding_dims": {"C2": 16, "C3": 4}},
        "optim": {"dense": {"name": "sgd", "lr": 0.1}, "tables": {"name": "adagrad", "lr": RATE, "eps": 1e-3}},
        "train": {"device": "cpu", "global_batch_size": 100, "max_steps": STEPS, "log_every_steps": 1},
        "eval": {"global_batch_size": 200},
        "checkpoint": {"every_steps": 3},
    }


class PlainTables(nn.Module):
    """Ordinary tensors, one for each table, and torch's own lookups."""

    def __init__(self, values: Config) -> None:
        super().__init__()
        self.widths = dict(WIDTHS)
        self.rows = nn.ParameterDict({owner: self._first_values(owner, FEATURES[owner]) for owner in self.widths})

    def _first_values(self, owner: str, rows: int) -> nn.Parameter:
        """By the documented formula: stream (seed, table), value number row * dim + column."""
        width = self.widths[owner]
        values = rng.uniform_floats(rng.stream_key(1, "table", f"table_{owner}"), 0, rows * width, rows**-0.5)
        first = torch.from_numpy(values.reshape(rows, width).copy())
        if owner in PADDING:
            first[PADDING[owner]] = 0
        return nn.Parameter(first)

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        pooled = [self._pooled(name, sparse[name].values(), sparse[name].lengths()) for name in FEATURES]
        return KeyedTensor(list(FEATURES), [bags.shape[1] for bags in pooled], torch.cat(pooled, dim=1))

    def _pooled(self, name: str, ids: Tensor, lengths: Tensor) -> Tensor:
        bags = []
        for own in ids.split(lengths.tolist()):
            own = own[own != PADDING.get(name, -1)]
            bag = F.embedding(own, self.rows[OWNERS[name]]).sum(0)
            bags.append(bag / max(len(own), 1) if name in MEAN else bag)
        return torch.stack(bags)


def trained_plainly(values: Config) -> tuple[list[float], PlainTables]:
    """Losses and tables of the same run in torch: no sharding, no kernels, torch's own optimizers.

    The model is built without padding and means, and the batches have all ids.
    """
    config = load_config(values | {"model": values["model"] | {"padding_ids": {}, "pooling": {}}})
    dataset = open_dataset(config.settings.data.path)
    module, task = model_module(config), task_module(config)
    torch.manual_seed(config.settings.train.seed)
    network = module.build(config.model, dataset.description, torch.device("meta"))
    network.tables = tables = PlainTables(values)
    of_tables = set(tables.parameters())
    optimizers = [
        torch.optim.SGD([p for p in network.parameters() if p not in of_tables], lr=0.1),
        torch.optim.Adagrad(of_tables, lr=RATE, eps=1e-3),
    ]
    out = []
    batches = build_source(config, dataset, rank=0, size=1).train_batches(0, 0)
    for _, batch in zip(range(STEPS), batches, strict=False):
        loss = task.loss_sum(network, batch) / batch.weight()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        out.append(float(loss.detach()))
    return out, tables


def table_of(run: Path, owner: str) -> Tensor:
    return tensors_of(newest(run))[f"model.tables.embedding_bags.table_{owner}.weight"]


@pytest.mark.parametrize(
    ("procs", "sharding", "kernels"),
    [
        (1, "table_wise", "auto"),
        (1, "table_wise", "torch"),
        (2, "table_wise", "auto"),
        (3, "row_wise", "auto"),
        (2, "row_wise", "torch"),
        (2, "column_wise", "auto"),
        (2, "table_row_wise", "auto"),
        (2, "grid", "auto"),
        (2, "data_parallel", "auto"),
    ],
)
def test_losses_and_tables_are_those_of_plain_torch(
    procs: int, sharding: str, kernels: str, config: Config, tmp_path: Path
) -> None:
    config["sharding"] = {"default": sharding}
    config["train"]["kernels"] = kernels
    train(config, tmp_path / "run", procs=procs)
    expected, tables = trained_plainly(config)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-5)
    for owner, rows in tables.rows.items():
        torch.testing.assert_close(table_of(tmp_path / "run", owner), rows.detach(), rtol=1e-4, atol=1e-5)
    assert not table_of(tmp_path / "run", "C2")[0].any() and not table_of(tmp_path / "run", "C3")[7].any()
    placed = json.loads((tmp_path / "run" / "sharding.json").read_text())
    assert [(table["table"], table["dim"]) for table in placed] == [("table_C1", 8), ("table_C2", 16), ("table_C3", 4)]
    if sharding == "table_wise":
        assert sum(placed[1]["bytes_by_rank"].values()) == 2 * 4 * 16 * 4000  # once, with Adagrad's state


def on_a_disk(path: Path) -> None:
    if file_system(path) == "tmpfs":
        pytest.skip(f"{path} is in memory, where cached_ssd refuses to keep rows: choose a disk with --basetemp")


@pytest.mark.parametrize(("procs", "optimizer"), [(1, "sgd"), (2, "rowwise_adagrad"), (3, "adagrad")])
def test_cached_tables_have_the_same_bits(procs: int, optimizer: str, config: Config, tmp_path: Path) -> None:
    on_a_disk(tmp_path)
    config["model"] |= {"embedding_dims": {"C2": 128, "C3": 64}}
    config["optim"]["tables"]["name"] = optimizer
    config["sharding"] = {"default": "row_wise"}
    train(config, tmp_path / "memory", procs=procs)
    tables = {"cache_memory_budget_mb": 4, "stores": {"C4": "cached_ssd", "C3": "cached_ssd"}}
    train(config | {"tables": tables}, tmp_path / "cached", procs=procs)
    assert learned(tmp_path / "cached") == learned(tmp_path / "memory")
    assert_same_tensors(tmp_path / "cached", tmp_path / "memory")
    assert not table_of(tmp_path / "cached", "C2")[0].any() and not table_of(tmp_path / "cached", "C3")[7].any()
    misses = [line["store_misses"] for line in metric_lines(tmp_path / "cached") if line["split"] == "train"]
    assert procs > 1 or sum(misses) > 0  # rows were evicted and read again
    placed = json.loads((tmp_path / "cached" / "sharding.json").read_text())
    assert [(table["table"], table["store"]) for table in placed] == [
        ("table_C1", "device_mem"),
        ("table_C2", "cached_ssd"),
        ("table_C3", "cached_ssd"),
    ]


def test_adam_does_not_train_padding_either(config: Config, tmp_path: Path) -> None:
    config["optim"]["tables"] = {"name": "adam", "lr": 0.01}
    for procs, sharding in ((1, {"mode": "ddp"}), (2, {"default": "row_wise"})):
        train(config | {"sharding": sharding}, tmp_path / str(procs), procs=procs)
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=2e-5)
    for owner, padding in (("C2", 0), ("C3", 7)):
        state = tensors_of(newest(tmp_path / "2"))
        of_table = [value for key, value in state.items() if f"table_{owner}.weight" in key and value.dim() == 2]
        assert len(of_table) == 3  # the rows and two moments
        assert all(not value[padding].any() and value.any() for value in of_table)


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = tensors_of(newest(one)), tensors_of(newest(other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_run_resumes_with_another_sharding_store_and_number_of_processes(config: Config, tmp_path: Path) -> None:
    on_a_disk(tmp_path)
    cached = {"store": "cached_ssd", "cache_memory_budget_mb": 4}
    stages: list[tuple[int, int, str, Config]] = [
        (2, 2, "row_wise", {}),
        (4, 3, "table_wise", cached),
        (STEPS, 1, "data_parallel", {}),
    ]
    for last_step, procs, sharding, tables in stages:
        changed = config | {"sharding": {"default": sharding}, "tables": tables}
        changed["train"] = config["train"] | {"max_steps": last_step}
        train(changed, tmp_path / "run", procs=procs)
    expected, plain = trained_plainly(config)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-5)
    torch.testing.assert_close(table_of(tmp_path / "run", "C2"), plain.rows["C2"].detach(), rtol=1e-4, atol=1e-5)
    one, two = (evaluate(tmp_path / "run", procs=procs)["auroc"] for procs in (1, 2))
    assert one == pytest.approx(two, rel=1e-6)
    config["train"]["max_steps"] = 1
    config["model"]["padding_ids"] = {"C2": 1}
    train(config, tmp_path / "new", init_from=tmp_path / "run")
    assert table_of(tmp_path / "run", "C2")[1].any() and not table_of(tmp_path / "new", "C2")[1].any()
    assert losses(tmp_path / "new")[0] != pytest.approx(expected[0], rel=1e-3)  # it starts where the other run ended
