"""Tables in files behind a cache: the same bits as in memory, from any checkpoint to any other."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import tomli_w
import torch

import recmill
from recmill import prepare
from recmill.checkpoints.format import MANIFEST, file_facts
from recmill.commands.assemble import build_source, open_matching_dataset
from recmill.config import load_config
from recmill.data.opening import open_dataset
from recmill.errors import CheckpointError, ConfigError, ResourceError
from recmill.tables.stores.row_file import file_system

from ..checkpoints import newest, tensors_of
from ..group import evaluate, exit_code, in_group, train
from ..processes import send, wait_until
from .runs import learned, metric_lines

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Config = dict[str, Any]
CACHED: dict[str, Any] = {"store": "cached_ssd", "cache_memory_budget_mb": 2}
# So wide that the rows of two processes do not fit in their caches either.
WIDE = {"model": {"name": "dlrm", "embedding_dim": 256, "bottom_mlp": [256], "top_mlp": [8]}}


@pytest.fixture(autouse=True)
def _on_a_disk(tmp_path: Path) -> None:
    if file_system(tmp_path) == "tmpfs":
        pytest.skip(f"{tmp_path} is in memory, where cached_ssd refuses to keep rows: choose a disk with --basetemp")


@pytest.fixture(scope="module")
def random_clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,600 rows for training with uniform ids: more different rows than a cache of 2 MB holds."""
    path = tmp_path_factory.mktemp("data") / "clicks"
    prepare("random-clicks", path, rows=2400, days=3, dense=2, tables=[1, 7, 3000, 20000])
    return path


@pytest.fixture
def clicks_config(random_clicks: Path) -> Config:
    return {
        "data": {"path": str(random_clicks)},
        "model": {"name": "dlrm", "embedding_dim": 128, "bottom_mlp": [128], "top_mlp": [8]},
        "train": {"device": "cpu", "global_batch_size": 160, "num_epochs": 2, "log_every_steps": 1},
        "eval": {"global_batch_size": 400, "every_steps": 7},
        "checkpoint": {"every_steps": 5},
    }


def counters(run: Path, name: str) -> list[float]:
    return [line[name] for line in metric_lines(run) if line["split"] == "train"]


def assert_same_tensors(one: Path, other: Path) -> None:
    ours, theirs = tensors_of(newest(one)), tensors_of(newest(other))
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert torch.equal(ours[key].reshape(-1).view(torch.uint8), theirs[key].reshape(-1).view(torch.uint8)), key


@pytest.mark.parametrize(
    ("procs", "optimizer", "sharding", "budget_mb"),
    [
        (1, "sgd", {"default": "row_wise"}, 2),
        (2, "rowwise_adagrad", {"default": "row_wise", "tables": {"C3": "table_wise"}}, 3),
        (3, "adagrad", {"default": "table_wise"}, 2),
        (2, "adam", {"default": "row_wise"}, 3),
    ],
)
def test_losses_tables_and_optimizer_state_have_the_bits_of_tables_in_memory(
    procs: int, optimizer: str, sharding: dict[str, Any], budget_mb: int, clicks_config: Config, tmp_path: Path
) -> None:
    config = clicks_config | {"optim": {"tables": {"name": optimizer}}, "sharding": sharding}
    train(config, tmp_path / "memory", procs=procs)
    tables = {"store": "cached_ssd", "cache_memory_budget_mb": budget_mb, "stores": {"C2": "device_mem"}}
    train(config | {"tables": tables}, tmp_path / "cached", procs=procs)
    assert learned(tmp_path / "cached") == learned(tmp_path / "memory")
    assert_same_tensors(tmp_path / "cached", tmp_path / "memory")
    assert sum(counters(tmp_path / "cached", "store_misses")) > 0  # rows were evicted and read again
    placed = json.loads((tmp_path / "cached" / "sharding.json").read_text())
    assert [table["store"] for table in placed] == ["cached_ssd", "device_mem", "cached_ssd", "cached_ssd"]
    in_caches = [table["bytes_by_rank"] for table in placed if table["store"] == "cached_ssd"]
    for rank in range(procs):
        assert 0 < sum(held.get(str(rank), 0) for held in in_caches) <= (budget_mb << 20) + len(placed)


@pytest.mark.parametrize("procs", [1, 2])
def test_looking_ahead_changes_no_bit_in_training_validation_or_after_a_resume(
    procs: int, clicks_config: Config, tmp_path: Path
) -> None:
    """Two caches in process 0, validations at 7 and 14, epochs that end at 10 and 20, a resume at 12."""
    config = clicks_config | {"sharding": {"default": "row_wise", "tables": {"C3": "table_wise"}}}
    config["data"] = config["data"] | {"multi_hot": {"sizes": [1, 1, 2, 1]}}
    horizons: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    stages: list[tuple[int | str, list[int]]] = [(0, [20]), (1, [20]), ("auto", [12, 20])]
    for lookahead, last_steps in stages:
        run = tmp_path / str(lookahead)
        tables = CACHED | {"cache_memory_budget_mb": 4, "lookahead": lookahead}
        for last_step in last_steps:
            train(config | {"tables": tables, "train": config["train"] | {"max_steps": last_step}}, run, procs=procs)
        horizons[run.name], losses[run.name] = counters(run, "store_horizon"), counters(run, "loss")
        assert_same_tensors(run, tmp_path / "0")
    assert losses["auto"] == losses["1"] == losses["0"] and len(losses["0"]) == 20
    assert set(horizons["0"]) == {0}
    assert max(horizons["1"]) > 0
    assert max(horizons["auto"][:12]) > 0 and max(horizons["auto"][12:]) > 0  # before and after the resume


def test_a_table_of_sequences_has_the_same_bits_too(tmp_path: Path) -> None:
    prepare("random-histories", tmp_path / "d", random_user_count=400, random_item_count=4000, random_size=4000)
    config = {
        "data": {"path": str(tmp_path / "d")},
        "model": {"name": "sasrec", "embedding_dim": 128, "num_layers": 1, "max_length": 10},
        "train": {"device": "cpu", "global_batch_size": 50, "num_epochs": 2, "log_every_steps": 1},
        "eval": {"protocols": ["full"]},
        "sharding": {"default": "row_wise"},
    }
    train(config, tmp_path / "memory", procs=2)
    train(config | {"tables": CACHED}, tmp_path / "cached", procs=2)
    assert learned(tmp_path / "cached") == learned(tmp_path / "memory")
    assert_same_tensors(tmp_path / "cached", tmp_path / "memory")


def test_a_run_changes_its_store_sharding_and_budget_when_it_resumes(clicks_config: Config, tmp_path: Path) -> None:
    """Each store reads full and incremental checkpoints of the other."""
    train(clicks_config | {"sharding": {"default": "row_wise"}}, tmp_path / "memory", procs=2)
    stages: list[tuple[int, str, dict[str, Any]]] = [
        (7, "row_wise", CACHED),
        (9, "table_wise", {}),
        (14, "row_wise", CACHED | {"cache_memory_budget_mb": 3}),
        (20, "table_wise", CACHED),
    ]
    for last_step, sharding, tables in stages:
        changed = clicks_config | {
            "tables": tables,
            "sharding": {"default": sharding},
            "train": clicks_config["train"] | {"max_steps": last_step},
            "checkpoint": {"every_steps": 2, "full_every": 3},
        }
        train(changed, tmp_path / "changed", procs=2)
    assert_same_tensors(tmp_path / "changed", tmp_path / "memory")
    losses = [line for line in learned(tmp_path / "changed") if line["split"] == "train"]
    assert losses == [line for line in learned(tmp_path / "memory") if line["split"] == "train"]
    values = [evaluate(tmp_path / run, procs=1)["auroc"] for run in ("memory", "changed")]
    assert values[0] == values[1]  # on one process, from a cache and from memory


@pytest.mark.parametrize(
    "point", ["store.read@hit=40", "store.append@hit=3", "store.compact", "store.snapshot@hit=2", "ckpt.rows@step=10"]
)
def test_a_killed_run_leaves_nothing_of_its_row_file_and_resumes_with_the_same_bits(
    point: str, clicks_config: Config, tmp_path: Path
) -> None:
    config = clicks_config | {"tables": CACHED | {"path": str(tmp_path)}}
    run = tmp_path / "run"
    assert exit_code(recmill.train, config, run, fail=f"{point}:kill") == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    train(config, run)
    train(clicks_config, tmp_path / "memory")
    assert learned(run) == learned(tmp_path / "memory")
    assert_same_tensors(run, tmp_path / "memory")


def test_training_continues_after_a_checkpoint_that_could_not_be_written(clicks_config: Config, tmp_path: Path) -> None:
    """The disk of checkpoints is full when some rows are written, that of the rows is not."""
    checkpoints = {"every_steps": 5, "full_every": 3, "keep": 9, "on_error": "continue"}
    config = clicks_config | {"tables": CACHED, "checkpoint": checkpoints}
    assert exit_code(recmill.train, config, tmp_path / "cached", fail="ckpt.rows@step=10:nospace") == 0
    assert "no checkpoint: " in (tmp_path / "cached" / "log.txt").read_text()
    train(clicks_config, tmp_path / "memory")
    assert [path.name for path in sorted((tmp_path / "cached" / "checkpoints").glob("step-*"))] == [
        f"step-{step:08d}" for step in (5, 15, 20)
    ]
    assert learned(tmp_path / "cached") == learned(tmp_path / "memory")
    assert_same_tensors(tmp_path / "cached", tmp_path / "memory")


def test_a_run_whose_steps_wait_for_a_slow_disk_is_saved_when_it_is_stopped(
    clicks_config: Config, tmp_path: Path
) -> None:
    config = clicks_config | {"tables": CACHED | {"lookahead": 0}}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "recmill", "train", str(tmp_path / "config.toml")]
    slow = {**os.environ, "RECMILL_FAIL": "store.read:slow", "OMP_NUM_THREADS": "1"}
    run = tmp_path / "run"
    with subprocess.Popen([*command, "--run", str(run)], env=slow) as process:
        wait_until(lambda: (run / "metrics.jsonl").is_file() and max(counters(run, "store_wait_ms"), default=0) > 100)
        send(process.pid, signal.SIGTERM)
    assert process.returncode == 75
    steps = len(counters(run, "loss"))
    assert (run / "checkpoints" / f"step-{steps:08d}").is_dir() and steps < 20
    train(config, run)
    train(clicks_config, tmp_path / "memory")
    assert learned(run) == learned(tmp_path / "memory")


@pytest.mark.parametrize("row", [-1, 2**40])
def test_a_row_file_with_an_impossible_row_is_refused(row: int, clicks_config: Config, tmp_path: Path) -> None:
    """Only a file that was changed together with its digest can have one."""
    run = tmp_path / "run"
    config = clicks_config | {"tables": CACHED, "train": clicks_config["train"] | {"max_steps": 5}}
    train(config, run)
    checkpoint = newest(run).path
    (file,) = checkpoint.glob("*.rows")
    with file.open("r+b") as opened:
        opened.write(row.to_bytes(8, "little", signed=True))
    manifest = checkpoint / MANIFEST
    content = json.loads(manifest.read_text())
    content["files"][file.name] = file_facts(file)
    manifest.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{file} and state\.json disagree about its rows\. Restore it"):
        evaluate(run)


def test_a_new_run_with_another_seed_starts_from_the_rows_of_an_earlier_one(
    clicks_config: Config, tmp_path: Path
) -> None:
    """Rows that the earlier run never trained have the first values of its seed, which row files do not hold."""

    def config(seed: int, tables: Config) -> Config:
        return clicks_config | {"tables": tables, "train": clicks_config["train"] | {"seed": seed, "max_steps": 6}}

    for name, tables in (("memory", {}), ("cached", CACHED)):
        train(config(1, tables), tmp_path / name)
    train(config(2, {}), tmp_path / "expected", init_from=tmp_path / "memory")
    for earlier in ("memory", "cached"):
        run = tmp_path / f"from-{earlier}"
        train(config(2, CACHED), run, init_from=tmp_path / earlier)
        assert learned(run) == learned(tmp_path / "expected")
        assert_same_tensors(run, tmp_path / "expected")


def test_budgets_larger_than_the_machine_are_refused_at_the_start(clicks_config: Config, tmp_path: Path) -> None:
    config = clicks_config | {"tables": CACHED | {"cache_memory_budget_mb": 10_000_000}}
    with pytest.raises(ResourceError, match=r"of it for the cache\), .* Use a smaller tables\.cache_memory"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_budget_that_is_too_small_for_two_caches_is_refused_with_the_smallest_one_that_is_not(
    clicks_config: Config, tmp_path: Path
) -> None:
    config = clicks_config | {"sharding": {"default": "row_wise", "tables": {"C3": "table_wise"}}}
    config["train"] = config["train"] | {"max_steps": 1}

    def with_budget(megabytes: int) -> Config:
        return config | {"tables": CACHED | {"cache_memory_budget_mb": megabytes}}

    match = r"1 MB is too little for the 2 caches of process 0, .* Set it to at least (\d+), or use more"
    with pytest.raises(ConfigError, match=match) as refused:
        train(with_budget(1), tmp_path / "run")
    found = re.search(match, str(refused.value))
    assert found
    least = int(found[1])
    with pytest.raises(ConfigError, match=f"{least - 1} MB is too little"):
        train(with_budget(least - 1), tmp_path / "run")
    train(with_budget(least), tmp_path / "run")


def train_with_failure(config: Config, run: Path, entry: str) -> None:
    """In each process."""
    os.environ["RECMILL_FAIL"] = entry
    recmill.train(config, run)


def test_one_slow_rank_changes_no_bit(clicks_config: Config, tmp_path: Path) -> None:
    config = clicks_config | WIDE | {"sharding": {"default": "row_wise"}, "tables": CACHED | {"lookahead": 0}}
    config["train"] = config["train"] | {"max_steps": 12}
    in_group(2, train_with_failure, config, tmp_path / "slow", "store.read@rank=1@hit=5:slow")
    train(config | {"tables": {}}, tmp_path / "memory", procs=2)
    assert learned(tmp_path / "slow") == learned(tmp_path / "memory")
    assert_same_tensors(tmp_path / "slow", tmp_path / "memory")
    assert sum(counters(tmp_path / "slow", "store_misses")) > 0


def test_all_processes_end_with_the_error_of_the_one_whose_disk_fails(clicks_config: Config, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    config = clicks_config | WIDE | {"tables": CACHED | {"path": str(tmp_path / "rows")}}
    config["sharding"] = {"default": "row_wise"}
    (tmp_path / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "recmill", "train", str(tmp_path / "config.toml"), "--procs", "2"]
    ended = subprocess.run(
        [*command, "--run", str(tmp_path / "run")],
        env={**os.environ, "RECMILL_FAIL": "store.read@rank=1@hit=40:eio", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 5, ended.stderr
    fact = f"{tmp_path / 'rows'}: the row file: reading at byte "
    assert fact in ended.stderr and "Input/output error. The disk reports an error" in ended.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["rank"] == 1
    assert list((tmp_path / "rows").iterdir()) == []


def test_counters_and_the_closing_sentence_equal_a_recount_from_the_ids(clicks_config: Config, tmp_path: Path) -> None:
    """Validations at 7 and 14 change no counter. With the memory that the sentence advises, fewer rows are read."""
    config = clicks_config | {"tables": CACHED | {"lookahead": 0}}
    train(config, tmp_path / "run")
    loaded = load_config(config)
    source = build_source(loaded, open_matching_dataset(loaded), rank=0, size=1)
    batches = [ids for epoch in (0, 1) for ids in map(partial(source.global_ids, epoch), range(10))]
    known: set[tuple[str, int]] = set()
    all_rows = all_misses = 0
    lines = [line for line in metric_lines(tmp_path / "run") if line["split"] == "train"]
    for line, ids in zip(lines, batches, strict=True):
        assert ids is not None
        rows = {(feature, row) for feature, of_feature in ids.items() for row in of_feature.tolist()}
        first = len(rows - known)
        known |= rows
        misses = line["store_misses"]
        assert line["store_first"] == first
        assert misses == int(misses) and 0 <= misses <= len(rows) - first
        assert line["store_hit"] == pytest.approx(1 - (misses + first) / len(rows))
        read_bytes = line["store_read_mb_s"] * 1e6 * 160 / line["samples_per_s"]
        assert read_bytes <= misses * (12 + 4 * 129 + 2 * 4096) + 1  # rows with whole blocks around them
        assert 0 <= line["store_wait_ms"] <= 1e3 * 160 / line["samples_per_s"]
        all_rows, all_misses = all_rows + len(rows), all_misses + misses
    assert all_misses > 0
    assert max(line["store_read_mb_s"] for line in lines) > 0 < max(line["store_written_mb_s"] for line in lines)
    assert lines[-1]["store_disk_gb"] > 0
    pattern = (
        r"cached_ssd: ([\d.]+)% of the rows that steps needed were read from the disk; training waited for it "
        r"([\d.]+)% of the time; with tables\.cache_memory_budget_mb = (\d+) instead of 2, "
        r"(no row|(\d+)% fewer rows) would be read"
    )
    found = re.search(pattern, (tmp_path / "run" / "log.txt").read_text())
    assert found
    assert found[1] == f"{100 * all_misses / all_rows:.1f}"
    assert 0 <= float(found[2]) <= 100
    more = {"lookahead": 0, "cache_memory_budget_mb": int(found[3])}
    train(config | {"tables": CACHED | more}, tmp_path / "more")
    share = 0 if found[4] == "no row" else 1.1 - int(found[5]) / 100
    assert share <= 0.6 and sum(counters(tmp_path / "more", "store_misses")) <= share * all_misses


def test_cached_host_mem_on_cpu_is_device_mem_and_says_so(clicks_config: Config, tmp_path: Path) -> None:
    config = clicks_config | {"train": clicks_config["train"] | {"max_steps": 2}}
    for store in ("device_mem", "cached_host_mem"):
        train(config | {"tables": {"store": store}}, tmp_path / store)
    said = "tables.store = 'cached_host_mem': on CPU this is device_mem, for the device's memory is the host's"
    assert said in (tmp_path / "cached_host_mem" / "log.txt").read_text()
    assert said not in (tmp_path / "device_mem" / "log.txt").read_text()
    placed = [json.loads((tmp_path / run / "sharding.json").read_text()) for run in ("device_mem", "cached_host_mem")]
    assert placed[0] == placed[1]
    assert learned(tmp_path / "device_mem") == learned(tmp_path / "cached_host_mem")


RECOMMEND = """
import json, re, sys, recmill
users = recmill.recommend(sys.argv[1], users=sys.argv[2], k=3)
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10  # ru_maxrss begins with pytest's
print(json.dumps([peak, users]))
"""


def test_recommending_does_not_hold_a_cached_table_in_memory(tmp_path: Path) -> None:
    """The table of 30,000 rows takes 61 MB; the cache has 4 MB."""
    prepare("random-histories", tmp_path / "d", random_user_count=40, random_item_count=30000, random_size=40000)
    config = {
        "model": {"name": "sasrec", "embedding_dim": 512, "num_layers": 1, "max_length": 4},
        "optim": {"dense": {"name": "sgd"}},
        "train": {"device": "cpu", "global_batch_size": 4, "max_steps": 2},
        "data": {"path": str(tmp_path / "d"), "limit_val_batches": 1, "limit_test_batches": 1},
        "eval": {"protocols": ["full"], "global_batch_size": 8},
    }
    num_items = open_dataset(tmp_path / "d").histories.num_items
    peaks, found = {}, {}
    for store, tables in {"device_mem": {}, "cached_ssd": CACHED | {"cache_memory_budget_mb": 4}}.items():
        train(config | {"tables": tables}, tmp_path / store)
        user = pl.read_parquet(tmp_path / "d" / "users.parquet")["original_id"][0]
        command = [sys.executable, "-c", RECOMMEND, str(tmp_path / store), str(user)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        peaks[store], found[store] = json.loads(done.stdout)
    assert len(found["device_mem"]) == 3
    assert found["cached_ssd"] == found["device_mem"]
    assert peaks["device_mem"] - peaks["cached_ssd"] > 0.5 * 4 * 512 * num_items


GROUPS = {  # of memory: files with the limit, the peak and how often the limit was reached; versions 1 and 2
    "/sys/fs/cgroup/memory": ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.failcnt"),
    "/sys/fs/cgroup": ("memory.max", "memory.peak", "memory.events"),
}


class MemoryGroup:
    """A control group of memory, page cache included. Without the rights to make one, the test is skipped."""

    def __init__(self) -> None:
        for root, (limit, peak, hits) in GROUPS.items():
            self.folder = Path(root, f"recmill-test-{os.getpid()}")
            with suppress(OSError):
                self.folder.mkdir()
                self._limit, self._peak, self._hits = (self.folder / name for name in (limit, peak, hits))
                if self._limit.exists() and self._peak.exists():  # else the folder is in a tmpfs, or Linux is too old
                    return
                self.folder.rmdir()
        pytest.skip("no control group of memory can be made here: it needs root and a writable /sys/fs/cgroup")

    def __enter__(self) -> "MemoryGroup":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in map(int, (self.folder / "cgroup.procs").read_text().split()):
            send(pid, signal.SIGKILL)
        wait_until(lambda: not (self.folder / "cgroup.procs").read_text())
        self.folder.rmdir()

    def train(self, config: Config, run: Path, limit: int = 0) -> "subprocess.CompletedProcess[str]":
        """Run `recmill train` in this group. The dataset is not in the page cache when it starts."""
        if limit:
            self._limit.write_text(str(limit))
            for name in ("memory.swappiness", "memory.swap.max"):  # of version 1 and 2
                if (self.folder / name).exists():
                    (self.folder / name).write_text("0")
        for file in Path(config["data"]["path"]).iterdir():
            with file.open() as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        path = run.with_suffix(".toml")
        path.write_text(tomli_w.dumps(config), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "recmill", "train", str(path), "--run", str(run)]
        join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]
        return subprocess.run([*join, *command], capture_output=True, text=True, check=False, timeout=180)

    def peak(self) -> int:
        return int(self._peak.read_text())

    def limit_hits(self) -> int:
        """Return how often pages had to be reclaimed because the group was full."""
        return int(re.findall(r"^(?:max )?(\d+)$", self._hits.read_text(), re.MULTILINE)[0])


def test_a_run_fits_in_a_control_group_of_its_budget_even_if_its_dataset_does_not(tmp_path: Path) -> None:
    """268 MB of tables and 72 MB of data, in what the same run needs with tiny tables and tiny data + 48 MB."""
    prepare("random-clicks", tmp_path / "tiny", rows=1000, days=3, dense=3000, tables=[10] * 8)
    prepare("random-clicks", tmp_path / "large", rows=12_000, days=6, dense=3000, tables=[32_768] * 8)
    data_bytes = sum(file.stat().st_size for file in (tmp_path / "large").iterdir())
    in_memory: Config = {
        "data": {"path": str(tmp_path / "large")},
        "model": {"name": "dlrm", "embedding_dim": 256, "bottom_mlp": [256], "top_mlp": [8]},
        "train": {"device": "cpu", "global_batch_size": 250, "log_every_steps": 1},
        "eval": {"global_batch_size": 250},
    }
    cached = in_memory | {"tables": CACHED | {"cache_memory_budget_mb": 24}}
    with MemoryGroup() as group:
        train(cached, tmp_path / "unlimited")  # not in the group; first, because it may have to compile the kernels
        ended = group.train(in_memory | {"data": {"path": str(tmp_path / "tiny")}}, tmp_path / "base")
        assert ended.returncode == 0, ended.stderr
        base = group.peak()
    room = (24 + 24) << 20  # the budget, and a slack for batches and Python
    assert data_bytes > 1.3 * room
    with MemoryGroup() as group:
        ended = group.train(cached, tmp_path / "limited", limit=base + room)
        assert ended.returncode == 0, ended.stderr
        assert group.peak() <= base + room
        assert group.limit_hits() > 0  # pages of the dataset were pushed out
    assert learned(tmp_path / "limited") == learned(tmp_path / "unlimited")
    assert sum(counters(tmp_path / "limited", "store_misses")) > 0
    with MemoryGroup() as group:
        ended = group.train(in_memory, tmp_path / "device_mem", limit=base + room)
    assert ended.returncode == 5 and "was killed by SIGKILL. The system may have run out of memory" in ended.stderr
