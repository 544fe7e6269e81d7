"""Dynamic tables: the same run as dictionaries in plain Python, for any number of processes, after kills and moves."""

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import recmill
from recmill import prepare, rng
from recmill.checkpoints.row_files import saved_keys, saved_rows
from recmill.commands.assemble import build_source, model_module, open_matching_dataset, task_module
from recmill.commands.checkpoint import export_rows
from recmill.config import load_config
from recmill.data.opening import open_dataset
from recmill.errors import CheckpointError, ConfigError
from recmill.tables.stores.row_file import file_system

from ..checkpoints import newest
from ..criteo_raw import sparse, write_days
from ..group import evaluate, exit_code, train
from .runs import learned, losses, metric_lines, prepared_clicks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Config = dict[str, Any]
Ids = dict[int, Any]  # by id; -1, -2 ... are shared rows
FEATURES = {"C1": 40, "C2": 300, "C3": 30, "C4": 500}
RULES: dict[str, dict[str, Any]] = {
    "C1": {"max_rows": 40, "admit_probability": 0.3},
    "C2": {"max_rows": 300, "min_count": 2, "expire_after_steps": 4},
    "C4": {"max_rows": 500, "expire_after_steps": 3},
}
DIM, RATE, EPS = 8, 0.3, 1e-3


@pytest.fixture(scope="module")
def random_clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_clicks(tmp_path_factory, FEATURES.values())


@pytest.fixture
def config(random_clicks: Path) -> Config:
    """Twelve steps of 50 rows, which three processes cannot share equally."""
    return {
        "data": {"path": str(random_clicks)},
        "model": {"name": "dlrm", "embedding_dim": DIM, "bottom_mlp": [DIM], "top_mlp": [8]},
        "optim": {"dense": {"name": "sgd", "lr": 0.1}, "tables": {"name": "adagrad", "lr": RATE, "eps": EPS}},
        "tables": {"dynamic": RULES},
        "train": {"device": "cpu", "global_batch_size": 50, "max_steps": 12, "log_every_steps": 1},
        "eval": {"global_batch_size": 100, "every_steps": 5},
        "checkpoint": {"every_steps": 2, "full_every": 3},
    }


class PlainTables(nn.Module):
    """A dictionary of rows for each table, and the rules of admission and expiry in plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0
        self.rows: dict[str, dict[int, Tensor]] = {name: {} for name in FEATURES}
        self.squares: dict[str, dict[int, Tensor]] = {name: {} for name in FEATURES}
        self.counts: dict[str, Counter[int]] = {name: Counter() for name in FEATURES}
        self.lasts: dict[str, dict[int, int]] = {name: {} for name in FEATURES}
        self.used: list[tuple[str, list[int], Tensor]] = []
        self.admitted = 0

    def forward(self, sparse: KeyedJaggedTensor) -> KeyedTensor:
        self.used = []
        pooled = [self._looked_up(name, sparse[name].values().tolist()) for name in FEATURES]
        return KeyedTensor(list(FEATURES), [DIM] * len(FEATURES), torch.cat(pooled, dim=1))

    def _looked_up(self, name: str, keys: list[int]) -> Tensor:
        names = self._named(name, keys) if name in RULES else keys
        unique = list(dict.fromkeys(names))
        rows = torch.stack([self.rows[name].setdefault(row, self._first_values(name, row)) for row in unique])
        self.used.append((name, unique, rows.requires_grad_()))
        return rows[[unique.index(row) for row in names]]

    def _named(self, name: str, keys: list[int]) -> list[int]:
        rules, rows, counts, lasts = RULES[name], self.rows[name], self.counts[name], self.lasts[name]
        own = {row for row in rows if row >= 0}
        for key, occurrences in Counter(keys).items():
            if self.is_expired(name, key):
                for known in (rows, self.squares[name], counts, lasts):
                    known.pop(key, None)
                own.discard(key)
            if "admit_probability" in rules and key not in own:
                stream = rng.bits(rng.stream_key(1, "admission", f"table_{name}"), np.array([key]))
                if rng.uniform(stream, np.array([self.clock]))[0] >= rules["admit_probability"]:
                    continue
            counts[key] += occurrences
            lasts[key] = self.clock
            if key not in own and counts[key] >= rules.get("min_count", 1):
                own.add(key)
                self.admitted += 1
        return [key if key in own else -1 - key // 2**52 for key in keys]

    def is_expired(self, name: str, key: int) -> bool:
        limit, lasts = RULES[name].get("expire_after_steps", 0), self.lasts[name]
        return limit > 0 and key in lasts and self.clock - lasts[key] >= limit

    def _first_values(self, name: str, row: int) -> Tensor:
        stream = rng.stream_key(1, "table", f"table_{name}")
        bound = FEATURES[name] ** -0.5
        if row < 0:
            return torch.zeros(DIM)
        if name in RULES:
            return torch.from_numpy(rng.uniform_floats(rng.bits(stream, np.array([row]))[0], 0, DIM, bound))
        return torch.from_numpy(rng.uniform_floats(stream, row * DIM, DIM, bound))

    def update(self) -> None:
        """Adagrad for the rows that the last batch used."""
        for name, used, rows in self.used:
            assert rows.grad is not None
            for row, value, gradient in zip(used, rows.detach(), rows.grad, strict=True):
                squares = self.squares[name].get(row, torch.zeros(DIM)) + gradient.square()
                self.squares[name][row] = squares
                self.rows[name][row] = value - RATE * gradient / (squares.sqrt() + EPS)
        self.clock += 1


def trained_plainly(values: Config) -> tuple[list[float], PlainTables]:
    config = load_config(values)
    dataset = open_dataset(config.settings.data.path)
    torch.manual_seed(config.settings.train.seed)
    network = model_module(config).build(config.model, dataset.description, torch.device("meta"))
    network.tables = tables = PlainTables()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    out = []
    batches = build_source(config, dataset, rank=0, size=1).train_batches(0, 0)
    for _, batch in zip(range(config.settings.train.max_steps), batches, strict=False):
        loss = task_module(config).loss_sum(network, batch) / batch.weight()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tables.update()
        out.append(float(loss.detach()))
    return out, tables


def saved_tables(run: Path) -> dict[str, Ids]:
    """Rows and states of dynamic tables by key, of the newest checkpoint; of all rows that still have an id."""
    checkpoint = newest(run)
    known = {
        name: set(entries.keys[entries.rows >= 0].tolist()) for name, (_, entries) in saved_keys(checkpoint).items()
    }
    found: dict[str, Ids] = {name.removeprefix("table_"): {} for name in known}
    for directory, file in checkpoint.row_files:
        for table, keys, *values in saved_rows(directory, file):
            if table.name in known:
                rows = zip(keys.tolist(), *values, strict=True)
                own = {key: parts for key, *parts in rows if key < 0 or key in known[table.name]}
                found[table.name.removeprefix("table_")] |= own
    return found


def assert_same_rows(run: Path, tables: PlainTables) -> None:
    saved = saved_tables(run)
    assert saved.keys() == RULES.keys()
    for name, rows in saved.items():
        own = {key for key in tables.rows[name] if key >= 0 and not tables.is_expired(name, key)}
        assert {key for key in rows if key >= 0} == own, name
        for key, (weights, squares) in rows.items():
            expected = tables.rows[name].get(key, torch.zeros(DIM)), tables.squares[name].get(key, torch.zeros(DIM))
            torch.testing.assert_close(torch.from_numpy(weights), expected[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(torch.from_numpy(squares), expected[1], rtol=1e-3, atol=1e-7)
        _, entries = saved_keys(newest(run))[f"table_{name}"]
        listed = zip(entries.keys.tolist(), entries.counts.tolist(), entries.lasts.tolist(), strict=True)
        assert sorted(listed) == sorted(
            (key, tables.counts[name][key], last)
            for key, last in tables.lasts[name].items()
            if not tables.is_expired(name, key)
        )


@pytest.mark.parametrize(
    ("procs", "sharding"), [(1, {}), (2, {"tables": {"C2": "table_wise"}}), (3, {"default": "row_wise"})]
)
def test_losses_rows_and_counts_are_those_of_dictionaries(
    procs: int, sharding: Config, config: Config, tmp_path: Path
) -> None:
    train(config | {"sharding": sharding}, tmp_path / "run", procs=procs)
    expected, tables = trained_plainly(config)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-5)
    assert_same_rows(tmp_path / "run", tables)
    lines = [line for line in metric_lines(tmp_path / "run") if line["split"] == "train"]
    assert sum(line["dynamic_admitted"] for line in lines) == tables.admitted
    assert sum(line["dynamic_expired"] for line in lines) > 0
    assert lines[-1]["dynamic_rows"] == sum(
        line["dynamic_admitted"] - line["dynamic_expired"] for line in lines
    )  # of all lines


def test_a_killed_run_resumes_with_the_same_bits(config: Config, tmp_path: Path) -> None:
    config["optim"]["tables"]["name"] = "adam"  # two states, and a number of steps
    train(config, tmp_path / "unbroken")
    assert exit_code(recmill.train, config, tmp_path / "run", fail="train.step@step=9:kill") == -signal.SIGKILL
    train(config, tmp_path / "run")
    assert [line["loss"] for line in learned(tmp_path / "run") if line["split"] == "train"] == [
        line["loss"] for line in learned(tmp_path / "unbroken") if line["split"] == "train"
    ]
    ours, theirs = saved_tables(tmp_path / "run"), saved_tables(tmp_path / "unbroken")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert {key: b"".join(map(bytes, parts)) for key, parts in ours[name].items()} == {
            key: b"".join(map(bytes, parts)) for key, parts in theirs[name].items()
        }


def test_a_run_may_change_its_number_of_processes_and_room_when_it_resumes(config: Config, tmp_path: Path) -> None:
    expected, tables = trained_plainly(config)
    for last_step, procs in ((3, 1), (6, 3), (9, 2), (12, 1)):
        rules = {name: rules | {"max_rows": rules["max_rows"] + last_step} for name, rules in RULES.items()}
        stage = config | {"tables": {"dynamic": rules}, "train": config["train"] | {"max_steps": last_step}}
        train(stage, tmp_path / "run", procs=procs)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=2e-5)
    assert_same_rows(tmp_path / "run", tables)
    values = [evaluate(tmp_path / "run", procs=procs)["auroc"] for procs in (1, 2)]
    assert values[0] == pytest.approx(values[1], abs=1e-6)
    assert_exported_rows_have_raw_ids(tmp_path / "run", tables)


def assert_exported_rows_have_raw_ids(run: Path, tables: PlainTables) -> None:
    file = run.with_name("rows.parquet")
    export_rows(run, "table_C2", file)
    frame = pl.read_parquet(file)
    expected = {int(rng.ids_of_keys(np.array([key]))[0]): key for key in tables.rows["C2"] if key >= 0}
    expected = {row: key for row, key in expected.items() if not tables.is_expired("C2", key)}
    assert frame["id"].to_list() == sorted(expected) and max(expected) < FEATURES["C2"]
    for row in frame.iter_rows(named=True):
        key = expected[row["id"]]
        assert row["count"] == tables.counts["C2"][key]
        assert row["steps_ago"] == tables.clock - tables.lasts["C2"][key]
        np.testing.assert_allclose(row["row"], tables.rows["C2"][key], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(row["state"], tables.squares["C2"][key], rtol=1e-3, atol=1e-7)
    export_rows(run, "table_C3", file)  # not dynamic
    frame = pl.read_parquet(file)
    assert frame["id"].to_list() == list(range(FEATURES["C3"])) and frame.columns == ["id", "row", "state"]
    for number, values in tables.rows["C3"].items():
        np.testing.assert_allclose(frame["row"][number], values, rtol=1e-4, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"no table 'C2'\. It has table_C1, table_C2"):
        export_rows(run, "C2", file)


def test_dynamic_tables_move_between_files_and_memory_and_keep_their_bits(config: Config, tmp_path: Path) -> None:
    if file_system(tmp_path) == "tmpfs":
        pytest.skip(f"{tmp_path} is in memory, where cached_ssd refuses to keep rows: choose a disk with --basetemp")
    config["model"] |= {"embedding_dim": 256, "bottom_mlp": [256]}
    config["sharding"] = {"default": "row_wise"}
    config["optim"]["tables"]["name"] = "adam"  # two states beside each row
    train(config, tmp_path / "memory", procs=2)
    tables = config["tables"] | {"store": "cached_ssd", "cache_memory_budget_mb": 4}
    for last_step, store in ((4, tables), (7, tables), (9, config["tables"]), (12, tables)):
        stage = {"tables": store, "train": config["train"] | {"max_steps": last_step}}
        train(config | stage, tmp_path / "cached", procs=2)
    ours, theirs = (
        [line for line in learned(tmp_path / run) if line["split"] == "train"] for run in ("cached", "memory")
    )
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
    in_files, in_memory = saved_tables(tmp_path / "cached"), saved_tables(tmp_path / "memory")
    for name in RULES:
        assert {key: b"".join(map(bytes, parts)) for key, parts in in_files[name].items()} == {
            key: b"".join(map(bytes, parts)) for key, parts in in_memory[name].items()
        }
    assert sum(line.get("store_misses", 0) for line in metric_lines(tmp_path / "cached")) > 0


def test_a_dynamic_table_with_a_padding_id_is_refused(config: Config) -> None:
    config["model"]["padding_ids"] = {"C2": 0}
    with pytest.raises(
        ConfigError, match=r"'tables.dynamic': 'table_C2' has the padding id 0, and a dynamic table can"
    ):
        open_matching_dataset(load_config(config))


def test_hashed_ids_of_criteo_logs_train_the_same_with_one_and_two_processes(config: Config, tmp_path: Path) -> None:
    write_days(tmp_path / "logs", [200, 60, 60])
    prepare("criteo", tmp_path / "data", input=tmp_path / "logs", ids="hash64")
    config["data"] = {"path": str(tmp_path / "data")}
    config["model"] |= {"embedding_dim": 4, "bottom_mlp": [4]}
    config["tables"] = {"dynamic": {"all": {"max_rows": 500}}}
    config["train"] |= {"max_steps": 0, "num_epochs": 1}
    config["eval"]["every_steps"] = 100
    for procs in (1, 2):
        train(config, tmp_path / f"run-{procs}", procs=procs)
    assert losses(tmp_path / "run-1") == pytest.approx(losses(tmp_path / "run-2"), rel=2e-5)
    trained = sparse(tmp_path / "data", days=2)  # the last day is for validation and the test
    distinct = sum(len({int(value) >> 2 for value in column}) for column in trained.T)  # 62 bits of each
    for procs in (1, 2):
        lines = [line for line in metric_lines(tmp_path / f"run-{procs}") if line["split"] == "train"]
        assert lines[-1]["dynamic_rows"] == distinct
