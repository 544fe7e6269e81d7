"""Every sharding type trains the same model. Loading checkpoints with another type: test_reshard.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from recmill import train
from recmill.config import load_config
from recmill.errors import ConfigError, ResourceError

from .. import group
from ..processes import free_port
from .runs import losses

STEPS = 8


def with_optimizer(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Rates so different that a table given to the dense optimizer would show at once."""
    optim = {"dense": {"name": "sgd", "lr": 0.01}, "tables": {"name": name, "lr": 0.3, "eps": 1e-3}}
    return {**config, "optim": optim, "train": {**config["train"], "max_steps": STEPS}}


def placed(run: Path) -> dict[str, tuple[str, list[int]]]:
    """What sharding.json says: type and ranks by table."""
    tables = json.loads((run / "sharding.json").read_text())
    return {t["table"]: (t["type"], sorted(map(int, t["bytes_by_rank"]))) for t in tables}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of fused tables in one process, by model and optimizer; filled as needed."""
    return {}


def assert_equals_one_rank(config: dict[str, Any], run: Path, tmp_path: Path, one_rank: dict[str, list[float]]) -> None:
    key = f"{config['model']['name']} {config['optim']['tables']['name']}"
    if key not in one_rank:
        group.train(config, tmp_path / "one-rank")
        one_rank[key] = losses(tmp_path / "one-rank")
    assert len(one_rank[key]) == STEPS
    assert losses(run) == pytest.approx(one_rank[key], rel=1e-6)


CASES = [
    ("dlrm", "adagrad", "table_wise"),
    ("dlrm", "adagrad", "row_wise"),
    ("dlrm", "adagrad", "column_wise"),
    ("dlrm", "adagrad", "table_row_wise"),
    ("dlrm", "adagrad", "grid"),
    ("dlrm", "adagrad", "data_parallel"),
    ("bert4rec", "rowwise_adagrad", "row_wise"),
    ("bert4rec", "rowwise_adagrad", "data_parallel"),
    ("bert4rec", "adagrad", "column_wise"),
    ("dlrm", "adam", "row_wise"),
    ("dlrm", "adam", "column_wise"),
    ("dlrm", "adam", "data_parallel"),
    ("bert4rec", "adam", "row_wise"),
]


def test_two_ranks_give_the_losses_of_one(dlrm: dict[str, Any], bert4rec: dict[str, Any], tmp_path: Path) -> None:
    models = {"dlrm": dlrm, "bert4rec": bert4rec}
    unsharded = {f"{m}-{o}": with_optimizer(models[m], o) for m, o, _ in CASES}
    sharded = {f"{m}-{o}-{kind}": {**unsharded[f"{m}-{o}"], "sharding": {"default": kind}} for m, o, kind in CASES}
    for size, configs in ((1, unsharded), (2, sharded)):
        for name, config in configs.items():
            group.train(config, tmp_path / name, procs=size)
    for model, optimizer, kind in CASES:
        run = tmp_path / f"{model}-{optimizer}-{kind}"
        is_spread = {name: ranks == [0, 1] for name, (found, ranks) in placed(run).items() if found == kind}
        assert list(is_spread.values()) == [kind != "table_wise"] * (4 if model == "dlrm" else 1)
        expected = losses(tmp_path / f"{model}-{optimizer}")
        assert len(expected) == STEPS
        assert losses(run) == pytest.approx(expected, rel=1e-6), run.name


def test_single_tables_get_their_own_type_by_table_or_feature(
    dlrm: dict[str, Any], tmp_path: Path, one_rank: dict[str, list[float]]
) -> None:
    config = with_optimizer(dlrm, "adagrad")
    config["sharding"] = {"default": "table_wise", "tables": {"table_C1": "data_parallel", "C3": "column_wise"}}
    group.train(config, tmp_path / "run", procs=2, overrides=["sharding.tables.C4=row_wise"])
    types = {name: kind for name, (kind, _) in placed(tmp_path / "run").items()}
    assert list(types.values()) == ["data_parallel", "table_wise", "column_wise", "row_wise"]
    assert_equals_one_rank({**config, "sharding": {}}, tmp_path / "run", tmp_path, one_rank)
    assert "table_C3  300    8    column_wise    0, 1     0.01" in (tmp_path / "run" / "log.txt").read_text()


def train_on_machines(config: dict[str, Any], folder: Path, ranks: int, local_size: int) -> Path:
    """As torchrun would on ranks / local_size machines, all of them this one."""
    (folder / "run.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    common = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local_size)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "recmill", "train", str(folder / "run.toml"), "--run", str(folder / "run")]
    workers = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank % local_size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [worker.communicate(timeout=200)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * ranks, "\n".join(outputs)
    return folder / "run"


def test_two_machines_of_two_ranks_give_the_losses_of_one(
    dlrm: dict[str, Any], tmp_path: Path, one_rank: dict[str, list[float]]
) -> None:
    config = with_optimizer(dlrm, "adagrad")
    kinds = {"C1": "table_row_wise", "C2": "grid", "C3": "table_row_wise", "C4": "grid"}
    run = train_on_machines({**config, "sharding": {"tables": kinds}}, tmp_path, ranks=4, local_size=2)
    by_table = {table: tuple(ranks) for table, (_, ranks) in placed(run).items()}
    assert {by_table["table_C1"], by_table["table_C3"]} <= {(0, 1), (2, 3)}
    assert {by_table["table_C2"], by_table["table_C4"]} == {(0, 1, 2, 3)}
    assert_equals_one_rank(config, run, tmp_path, one_rank)


@pytest.fixture
def endless(dlrm: dict[str, Any], clicks: Path, tmp_path: Path) -> dict[str, Any]:
    """A table of 10^12 rows: 32 TB, and as much of Adagrad's state."""
    copy = Path(shutil.copytree(clicks, tmp_path / "endless"))
    description = json.loads((copy / "dataset.json").read_text())
    description["sparse"][3]["rows"] = 10**12
    (copy / "dataset.json").write_text(json.dumps(description))
    return {**dlrm, "data": {"path": str(copy)}, "optim": {"tables": {"name": "adagrad"}}}


@pytest.mark.parametrize(("kind", "terabytes"), [("auto", 64), ("row_wise", 32), ("data_parallel", 128)])
def test_tables_that_do_not_fit_are_refused_before_anything_is_allocated(
    kind: str, terabytes: int, endless: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ResourceError) as caught:
        train(endless, tmp_path / "run", procs=2, overrides=[f"sharding.default={kind}"])
    assert f"needs {terabytes},000.0 GB for its rows, their optimizer's state and batches" in str(caught.value)
    assert "but can use" in str(caught.value)
    assert not (tmp_path / "run" / "sharding.json").exists()


def test_unknown_and_duplicate_names_are_refused_before_any_process_starts(
    dlrm: dict[str, Any], tmp_path: Path
) -> None:
    dlrm["sharding"] = {"tables": {"table_C44": "row_wise", "C3": "row_wise", "table_C3": "row_wise"}}
    dlrm["model"]["share_tables"] = {"C1": "C2"}
    dlrm["tables"] = {"stores": {"C7": "device_mem", "C1": "device_mem", "C2": "device_mem"}}
    with pytest.raises(ConfigError) as caught:
        train(dlrm, tmp_path / "run")
    assert "'sharding.tables': unknown table 'table_C44'. Did you mean 'table_C4'?" in str(caught.value)
    assert "'table_C3' and 'C3' are one table: name it once" in str(caught.value)
    assert "'tables.stores': unknown table 'C7'." in str(caught.value)
    assert "'tables.stores': 'C2' and 'C1' are one table: name it once" in str(caught.value)
    assert not (tmp_path / "run").exists()
    load_config(dlrm)  # without the data nobody can know
