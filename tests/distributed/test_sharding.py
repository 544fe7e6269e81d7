"""Every sharding type trains the same model. Loading checkpoints with another type: test_reshard.py."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill import train
from recmill.config import load_config
from recmill.config.sections import TablesOptim
from recmill.errors import ConfigError, ResourceError
from recmill.tables.placement import Request
from recmill.tables.sharding import shard
from recmill.tables.spec import TableSpec
from recmill.tables.torchrec_internals import table_shards
from recmill.world import joined_world

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


@pytest.mark.parametrize("name", ["logistic", "fm", "deepfm", "finalmlp"])
def test_models_of_fields_give_the_losses_of_one_rank(name: str, dlrm: dict[str, Any], tmp_path: Path) -> None:
    """Of `logistic`, tables are 4 wide."""
    model = {"name": name, **({} if name == "logistic" else {"embedding_dim": 8}), "share_tables": {"C1": "C2"}}
    config = with_optimizer({**dlrm, "model": model}, "adagrad")
    for size, kind in ((1, "auto"), (2, "row_wise")):
        group.train({**config, "sharding": {"default": kind}}, tmp_path / f"{size}", procs=size)
    assert len(losses(tmp_path / "1")) == STEPS
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-6)


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


ROWS, DIM, BAGS, RANKS = 12, 12, 4, 3
ROUNDING = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}  # half of the last digit, relative
RANDOM = np.random.default_rng(5)
WEIGHTS = RANDOM.uniform(-1, 1, (ROWS, DIM)).astype(np.float32)
IDS = RANDOM.integers(0, ROWS, (RANKS, BAGS, 2))
# As of a mean over thousands of samples: fp16 has no digits left for such numbers, unless they are scaled.
GRADIENTS = (RANDOM.uniform(0.5, 1, (RANKS, BAGS, DIM)) * 1e-7).astype(np.float32)
LEARNING_RATE = 2.0**20


def exchange(kind: str, precision: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Look up two ids per bag and update the rows; return the sums of all ranks, the new rows, and the bytes sent."""
    sent = []
    all_to_all = dist.all_to_all_single

    def counted(*arguments: Any, **options: Any) -> Any:
        values = options["input"] if "input" in options else arguments[1]
        sent.append(values.nbytes if values.is_floating_point() else 0)
        return all_to_all(*arguments, **options)

    with joined_world("cpu") as world:
        table = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["a"])
        network = torch.nn.Module()
        network.bags = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
        request = Request(
            [TableSpec("t", "a", ROWS, DIM, 0.1)],
            {"t": kind},
            "sgd",
            batch_size_per_rank=4096,
            ids_per_row={"a": 2},
            forward_precision=precision,
            backward_precision=precision,
        )
        model: Any = shard(network, request, TablesOptim(name="sgd", lr=LEARNING_RATE), world)
        for _, part in table_shards(model):
            rows, columns = part.values.shape
            part.values.copy_(torch.tensor(WEIGHTS[part.row : part.row + rows, part.column : part.column + columns]))
        ids = KeyedJaggedTensor.from_lengths_sync(
            ["a"], torch.tensor(IDS[world.rank].ravel()), torch.full((BAGS,), 2, dtype=torch.int32)
        )
        dist.all_to_all_single = counted
        sums = model.module.bags(ids).values()
        (sums * torch.tensor(GRADIENTS[world.rank])).sum().backward()
        shards = [(part.row, part.column, part.values.numpy().copy()) for _, part in table_shards(model)]
        gathered = world.gather((sums.detach().numpy(), shards))
    rows_after = np.full_like(WEIGHTS, np.nan)
    for row, column, values in (piece for _, shards in gathered or [] for piece in shards):
        rows_after[row : row + values.shape[0], column : column + values.shape[1]] = values
    return np.array([sums for sums, _ in gathered or []]), rows_after, sum(sent)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_what_is_sent_is_rounded_once_per_rank_and_no_more(kind: str) -> None:
    looked_up = WEIGHTS[IDS].astype(np.float64)  # [rank, bag, id, column]
    magnitude = np.abs(looked_up).sum(axis=2)
    steps, step_sizes = np.zeros((2, ROWS, DIM))  # of SGD; TorchRec takes the mean over ranks
    for ids, gradients in zip(IDS, GRADIENTS.astype(np.float64), strict=True):
        for position in range(2):
            np.add.at(steps, ids[:, position], LEARNING_RATE * gradients / RANKS)
            np.add.at(step_sizes, ids[:, position], LEARNING_RATE * np.abs(gradients) / RANKS)
    sent = {}
    for precision, rounding in ROUNDING.items():
        sums, rows, sent[precision] = group.in_group(RANKS, exchange, kind, precision)
        # row_wise adds the sums of the ranks in the precision in which they are sent.
        roundings = 2 * RANKS - 1 if kind == "row_wise" else 1
        wrong = np.abs(sums - looked_up.sum(axis=2))
        assert (wrong <= 1.01 * roundings * rounding * magnitude + 2.0**-22).all()
        wrong_rows = np.abs(rows - (WEIGHTS - steps))
        assert (wrong_rows <= 1.01 * rounding * step_sizes + 2.0**-22 * (np.abs(WEIGHTS) + np.abs(steps))).all()
        if precision != "fp32":
            assert wrong.max() > rounding * magnitude.max() / 20
            assert wrong_rows.max() > rounding * step_sizes.max() / 20
    if kind != "row_wise":  # whose sums go through a reduce-scatter
        assert sent["fp16"] == sent["bf16"] == sent["fp32"] / 2 > 0


def test_training_with_fewer_digits_between_processes(dlrm: dict[str, Any], tmp_path: Path) -> None:
    config = with_optimizer(dlrm, "adagrad")
    fewer = {"default": "row_wise", "forward_precision": "fp16", "backward_precision": "bf16"}
    runs = {"exact": {"default": "row_wise"}, "fewer": fewer}
    for name, sharding in runs.items():
        group.train({**config, "sharding": sharding}, tmp_path / name, procs=2)
    group.train({**config, "sharding": fewer}, tmp_path / "one")
    exact, rounded, one = (losses(tmp_path / name) for name in ("exact", "fewer", "one"))
    assert len(exact) == STEPS
    assert rounded != pytest.approx(exact, rel=1e-6)
    assert rounded == pytest.approx(exact, rel=ROUNDING["bf16"])
    assert one == pytest.approx(exact, rel=1e-6)  # one process sends nothing
    recorded = {name: json.loads((tmp_path / name / "env.json").read_text())["exchange"] for name in ("fewer", "one")}
    assert recorded == {
        "fewer": {"forward": "fp16", "backward": "bf16"},
        "one": {"forward": "fp32", "backward": "fp32"},
    }


@pytest.mark.parametrize("sharding", [{"mode": "ddp"}, {"default": "data_parallel"}])
def test_a_precision_without_an_exchange_is_an_error(
    sharding: dict[str, str], dlrm: dict[str, Any], tmp_path: Path
) -> None:
    config = {**dlrm, "sharding": {**sharding, "forward_precision": "fp16"}}
    with pytest.raises(ConfigError, match=r"sharding\.forward_precision = 'fp16', but every process has all tables"):
        train(config, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"sharding\.backward_precision.*'int8'"):
        train({**dlrm, "sharding": {"backward_precision": "int8"}}, tmp_path / "run")
