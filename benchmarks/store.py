"""Measure samples per second of DLRM steps with tables larger than memory, in each kind of store.

device_mem       all rows in memory: the reference
cached_ssd_4x    our cache, with a budget of a quarter of the tables; _16x: a sixteenth; _fits: larger than the tables
cached_ssd_first the quarter, from tables that were never trained, again and again; for the others, every row was
                 written before
mmap_4x          the tables in a mapped file, used in place by the same kernels
lmdb_4x, rocksdb_4x, sqlite_4x    the rows of a step are read from a database and written back
python_lru_4x    a dictionary of recently used rows in Python, over a mapped file
train, train_4x  `recmill train`, with device_mem and with cached_ssd at a quarter, after the first epoch

All but the last do the same step with the same kernels, and differ in where the rows are. Row-wise Adagrad; ids follow
Zipf's law with exponent 1.05, numbered by frequency or hashed. Each contender is a process. What it takes more with the
store than without, page cache included, is limited by a control group to the budget and 128 MB; train and train_4x have
no limit. All are started, then paused (SIGSTOP) except during their turns. Rates are medians over rounds, shares are
medians over neighbouring turns. The peers' packages are in requirements/store.txt.
"""

import argparse
import itertools
import json
import mmap
import os
import sqlite3
import statistics
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from turns import Contender, Notes, Work, median_ratio, noted_times, noted_work, our_times, run_all

from recmill import rng
from recmill.kernels.layers import use_kernels
from recmill.kernels.library import KernelLibrary, load_library
from recmill.launch.processes import TUNING
from recmill.nn.interactions import DotInteraction
from recmill.nn.mlp import mlp
from recmill.tables.stores.disk_probe import measure_disk
from recmill.tables.stores.row_cache import RowCache, RowLayout, Shard, plan_cache

NUM_TABLES = 26
NUM_DENSE = 13
BATCH = 2048
ZIPF = 1.05
WARM_UP = 8  # steps
FIRST = 150  # steps that cached_ssd_first takes before it begins again
TRAIN_ROWS = 200 * BATCH  # of an epoch of `recmill train`
SLACK_BYTES = 128 << 20
CHUNK = 1 << 13  # rows written at a time before the measurement
# By version of control groups: where they are, and the files of the limit and of the peak.
CGROUPS = {
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    Path("/sys/fs/cgroup"): ("memory.max", "memory.peak"),
}


@dataclass(frozen=True)
class Shape:
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


SHAPES = {
    "dim128": Shape(128, (512, 256, 128), (1024, 1024, 512, 256)),
    "dim16": Shape(16, (512, 256, 64, 16), (512, 256)),
}


@dataclass(frozen=True)
class Setting:
    """What a store gets: `values` floats per row, the last of which is the optimizer's."""

    rows: int
    dim: int
    budget: int
    directory: Path
    batches: list[np.ndarray]
    is_filled: bool

    @property
    def values(self) -> int:
        return self.dim + 1

    def chunks(self) -> Any:
        """Yield (keys, rows) that cover the tables."""
        for first in range(0, self.rows, CHUNK):
            keys = np.arange(first, min(self.rows, first + CHUNK))
            yield keys, np.full((len(keys), self.values), 0.01, np.float32)


class Store(Protocol):
    def begin(self, step: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (weights, state, the row of each key in them)."""

    def end(self) -> None:
        """Keep what the step has changed."""


class DeviceMem:
    def __init__(self, setting: Setting) -> None:
        self.weights = np.full((setting.rows, setting.dim), 0.01, np.float32)
        self.state = np.full((setting.rows, 1), 0.01, np.float32)

    def begin(self, step: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.weights, self.state, keys

    def end(self) -> None:
        pass


class CachedSsd:
    def __init__(self, setting: Setting) -> None:
        shards = tuple(
            Shard(setting.rows // NUM_TABLES, 0, rng.stream_key(1, "table", name), 0.01) for name in range(NUM_TABLES)
        )
        layout = RowLayout(shards, setting.dim, 1)
        self.cache = RowCache(layout, plan_cache(layout, setting.budget), setting.directory)
        for keys, rows in setting.chunks() if setting.is_filled else ():
            self.cache.load(keys, rows[:, :-1], rows[:, -1:])
        self._batches, self._pinned, self._step = setting.batches, threading.Condition(), 0
        self._is_over = False
        self._thread = threading.Thread(target=self._hint, daemon=True)
        if self.cache.plan.slots < layout.rows:  # as in training
            self._thread.start()

    def _hint(self) -> None:
        for batch in itertools.count():
            keys = self._batches[batch % len(self._batches)]
            with self._pinned:
                while not self._is_over and batch > self._step and not self.cache.hint(batch, keys):
                    self._pinned.wait()
                if self._is_over:
                    return

    def begin(self, step: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        slots = self.cache.pin(keys, step)
        with self._pinned:
            self._step = step
            self._pinned.notify()
        return self.cache.weights, self.cache.state, slots

    def end(self) -> None:
        self.cache.unpin()

    def close(self) -> None:
        with self._pinned:
            self._is_over = True
            self._pinned.notify()
        if self._thread.is_alive():
            self._thread.join()
        self.cache.close()

    def facts(self) -> str:
        seen = self.cache.counters()
        return (
            f"{self.cache.plan.slots:,} slots, hits {seen.hits / seen.rows:.0%}, misses {seen.misses / seen.rows:.0%}, "
            f"waited {seen.wait_seconds:.1f} s in {self._step:,} steps, horizon {seen.horizon}, "
            f"{seen.disk_bytes / 1e6:,.0f} MB on disk"
        )


class Mapped:
    """A file of rows, used in place."""

    def __init__(self, setting: Setting) -> None:
        self.weights = self._map(setting, "weights", setting.dim)
        self.state = self._map(setting, "state", 1)

    def _map(self, setting: Setting, name: str, columns: int) -> np.ndarray:
        with (setting.directory / name).open("w+b") as file:
            for keys, rows in setting.chunks():
                file.write(rows[: len(keys), :columns].tobytes())
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            mapped = mmap.mmap(file.fileno(), 0)
        mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, np.float32).reshape(-1, columns)

    def begin(self, step: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.weights, self.state, keys

    def end(self) -> None:
        pass


class Database:
    """Reads the different rows of a step into arrays, and writes them back. Subclasses have get() and put()."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        for keys, rows in setting.chunks():
            self.put(keys, rows)

    def get(self, keys: np.ndarray) -> list[bytes]:
        raise NotImplementedError

    def put(self, keys: np.ndarray, rows: np.ndarray) -> None:
        raise NotImplementedError

    def begin(self, step: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self.keys, slots = np.unique(keys, return_inverse=True)
        rows = np.frombuffer(b"".join(self.get(self.keys)), np.float32).reshape(-1, self.setting.values)
        self.weights, self.state = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, -1:])
        return self.weights, self.state, slots

    def end(self) -> None:
        self.put(self.keys, np.concatenate([self.weights, self.state], axis=1))


def _names(keys: np.ndarray) -> list[bytes]:
    packed = keys.astype(">i8").tobytes()
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]


class Lmdb(Database):
    def __init__(self, setting: Setting) -> None:
        import lmdb

        size = 4 * setting.rows * (4 * setting.values + 64)
        self.environment = lmdb.open(str(setting.directory), map_size=size, sync=False, readahead=False)
        super().__init__(setting)

    def get(self, keys: np.ndarray) -> list[bytes]:
        with self.environment.begin() as transaction:
            return [value for _, value in transaction.cursor().getmulti(_names(keys))]

    def put(self, keys: np.ndarray, rows: np.ndarray) -> None:
        with self.environment.begin(write=True) as transaction:
            transaction.cursor().putmulti(list(zip(_names(keys), map(bytes, rows), strict=True)))


class RocksDb(Database):
    def __init__(self, setting: Setting) -> None:
        from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch, WriteOptions

        options, blocks = Options(raw_mode=True), BlockBasedOptions()
        blocks.set_block_cache(Cache(setting.budget // 2))
        blocks.set_bloom_filter(10, False)
        options.set_block_based_table_factory(blocks)
        options.set_write_buffer_size(max(4 << 20, setting.budget // 8))
        options.create_if_missing(True)
        self.database, self.batch, self.write = Rdict(str(setting.directory), options), WriteBatch, WriteOptions()
        self.write.disable_wal = True
        super().__init__(setting)

    def get(self, keys: np.ndarray) -> list[bytes]:
        return list(self.database[_names(keys)])

    def put(self, keys: np.ndarray, rows: np.ndarray) -> None:
        batch = self.batch(raw_mode=True)
        for key, row in zip(_names(keys), map(bytes, rows), strict=True):
            batch.put(key, row)
        self.database.write(batch, self.write)


class Sqlite(Database):
    def __init__(self, setting: Setting) -> None:
        self.database = sqlite3.connect(setting.directory / "rows.sqlite", isolation_level=None)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{setting.budget * 3 // 4096}"):
            self.database.execute(f"PRAGMA {pragma}")
        self.database.execute("CREATE TABLE rows (key INTEGER PRIMARY KEY, value BLOB) WITHOUT ROWID")
        super().__init__(setting)

    def get(self, keys: np.ndarray) -> list[bytes]:
        query = "SELECT rows.value FROM json_each(?) AS k JOIN rows ON rows.key = k.value ORDER BY rows.key"
        return [value for (value,) in self.database.execute(query, (json.dumps(keys.tolist()),))]

    def put(self, keys: np.ndarray, rows: np.ndarray) -> None:
        self.database.execute("BEGIN")
        pairs = zip(keys.tolist(), map(bytes, rows), strict=True)
        self.database.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", pairs)
        self.database.execute("COMMIT")


class PythonLru(Database):
    def __init__(self, setting: Setting) -> None:
        path = setting.directory / "rows"
        self.file = np.memmap(path, np.float32, "w+", shape=(setting.rows, setting.values))
        self.cached: OrderedDict[int, bytes] = OrderedDict()
        self.capacity = setting.budget // (4 * setting.values + 200)  # 200: of a bytes object and its dictionary entry
        super().__init__(setting)

    def get(self, keys: np.ndarray) -> list[bytes]:
        found = []
        for key in keys.tolist():
            row = self.cached.pop(key, None)
            self.cached[key] = row if row is not None else bytes(self.file[key])
            found.append(self.cached[key])
        return found

    def put(self, keys: np.ndarray, rows: np.ndarray) -> None:
        for key, row in zip(keys.tolist(), map(bytes, rows), strict=True):
            self.cached[key] = row
        while len(self.cached) > self.capacity:
            key, row = self.cached.popitem(last=False)
            self.file[key] = np.frombuffer(row, np.float32)


# Name: (store, the tables' size / the budget, whether all rows were written before).
CONTENDERS: dict[str, tuple[type[Any], float, bool]] = {
    "device_mem": (DeviceMem, 0, True),
    "cached_ssd_4x": (CachedSsd, 4, True),
    "cached_ssd_16x": (CachedSsd, 16, True),
    "cached_ssd_first": (CachedSsd, 4, False),
    "cached_ssd_fits": (CachedSsd, 0.6, True),
    "mmap_4x": (Mapped, 4, True),
    "lmdb_4x": (Lmdb, 4, True),
    "rocksdb_4x": (RocksDb, 4, True),
    "sqlite_4x": (Sqlite, 4, True),
    "python_lru_4x": (PythonLru, 4, True),
}

IMPOSSIBLE = {("cached_ssd_16x", "dim16")}  # the index takes 5.1 bytes a row, more than a sixteenth of 68


class Dlrm:
    """The dense part of DLRM, and the kernels that read and update rows."""

    def __init__(self, shape: Shape, library: KernelLibrary) -> None:
        torch.manual_seed(1)
        self.dim, self.library = shape.dim, library
        interaction = DotInteraction(NUM_TABLES + 1, shape.dim, False, 16)
        self.bottom = mlp(NUM_DENSE, shape.bottom, padding=3)
        self.interaction = interaction
        self.top = mlp(interaction.out_features, shape.top, padding=interaction.padding)
        self.logit = nn.Linear(shape.top[-1], 1)
        layers = nn.ModuleList([self.bottom, interaction, self.top, self.logit])
        use_kernels(layers, library)
        self.optimizer = torch.optim.SGD(layers.parameters(), 0.01)
        self.dense, self.labels = torch.rand(BATCH, NUM_DENSE + 3), torch.randint(2, (BATCH,)).float()
        self.starts = torch.zeros(NUM_TABLES, dtype=torch.int64)
        self.offsets = torch.arange(NUM_TABLES * BATCH + 1)

    def step(self, store: Store, number: int, keys: np.ndarray) -> None:
        weights, state, slots = (torch.from_numpy(values) for values in store.begin(number, keys.astype(np.int64)))
        rows = torch.full((NUM_TABLES,), len(weights))
        tables = NUM_TABLES, self.dim, slots, self.offsets, BATCH
        bags = torch.empty(BATCH, NUM_TABLES * self.dim)
        assert self.library.call("sum_bags", weights, self.starts, rows, *tables, bags) < 0
        bags.requires_grad_()
        logits = self.logit(self.top(self.interaction(self.bottom(self.dense), bags))).squeeze(1)
        nn.functional.binary_cross_entropy_with_logits(logits, self.labels).backward()
        gradient = bags.grad
        assert isinstance(gradient, Tensor)
        memory = weights, self.starts, state, None, self.starts, 1, rows, torch.arange(NUM_TABLES)
        rowwise_adagrad = 2, torch.tensor([0.01, 1e-8, 0.0])
        self.library.call("update_bags", *memory, *tables, gradient.contiguous(), *rowwise_adagrad)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        store.end()


def zipf_batches(count: int, rows: int, is_hashed: bool) -> list[np.ndarray]:
    """Return keys (int32) of batches, by table."""
    random = np.random.default_rng(1)
    power = 1 - ZIPF
    batches = []
    for _ in range(count):
        uniform = random.random((NUM_TABLES, BATCH))
        ids = np.minimum(rows - 1, ((uniform * (float(rows) ** power - 1) + 1) ** (1 / power)).astype(np.int64) - 1)
        if is_hashed:
            ids = rng.Permutation(rows, rng.stream_key(1, "ids"))(ids.reshape(-1)).reshape(ids.shape)
        batches.append((ids + rows * np.arange(NUM_TABLES)[:, None]).reshape(-1).astype(np.int32))
    return batches


def limit_memory(size: int) -> None:
    """Put this process into a control group that may use `size` bytes more, if that is possible."""
    for root, (limit, _) in CGROUPS.items():
        group = root / f"recmill-store-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(size))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return
        except OSError:
            continue


class LimitedContender(Contender):
    """A contender whose peak is that of its control group: what the store takes, with its page cache."""

    def _group(self) -> Iterator[tuple[Path, str]]:
        for root, (_, peak) in CGROUPS.items():
            if (group := root / f"recmill-store-{self._processes[0].pid}").is_dir():
                yield group, peak

    def peak_mb(self) -> int:
        sizes = [int((group / peak).read_text()) for group, peak in self._group()]
        if not sizes:
            print(f"{self.name}: memory is not limited, because no control group can be made here")
        return round(sizes[0] / 2**20) if sizes else super().peak_mb()

    def end(self) -> None:
        groups = list(self._group())
        super().end()
        for group, _ in groups:
            group.rmdir()


def child(options: argparse.Namespace) -> None:
    """Take steps with one store, and record when each ended."""
    kind, ratio, is_filled = CONTENDERS[options.child]
    shape, rows = SHAPES[options.shape], options.rows_per_table
    library = load_library()
    assert library
    dlrm = Dlrm(shape, library)
    batches = zipf_batches(options.batches, rows, options.ids == "hashed")
    table_bytes = NUM_TABLES * rows * 4 * (shape.dim + 1)
    tiny = Setting(NUM_TABLES * rows // 50, shape.dim, 0, Path(), [], True)
    for keys in batches[:2]:
        dlrm.step(DeviceMem(tiny), 0, keys % tiny.rows)
    directory = options.times.parent / f"{options.child}-rows"
    directory.mkdir()
    budget = int(table_bytes / ratio) if ratio else table_bytes
    limit_memory(budget + SLACK_BYTES)
    setting = Setting(NUM_TABLES * rows, shape.dim, budget, directory, batches, is_filled)
    store, notes = kind(setting), Notes(options.times)
    for number in itertools.count():
        step = number if is_filled else number % FIRST
        if number and not step:
            store.close()
            store = kind(setting)
        dlrm.step(store, step, batches[number % len(batches)] if is_filled else batches[step])
        if number >= WARM_UP:
            notes.step(BATCH)
        if number % 50 == 49 and isinstance(store, CachedSsd):
            options.times.with_suffix(".facts").write_text(store.facts())


def write_rows(path: Path, rows_per_table: int, is_hashed: bool) -> None:
    """Write a dataset for `recmill train`."""
    from recmill import adopt

    batches = zipf_batches(TRAIN_ROWS // BATCH + 4, rows_per_table, is_hashed)
    starts = rows_per_table * np.arange(NUM_TABLES, dtype=np.int32)[:, None]
    random = np.random.default_rng(2)
    ids = np.concatenate([(keys.reshape(NUM_TABLES, BATCH) - starts).T for keys in batches])
    path.mkdir()
    np.save(path / "day_0_sparse.npy", np.ascontiguousarray(ids))
    np.save(path / "day_0_dense.npy", random.random((len(ids), NUM_DENSE), np.float32))
    np.save(path / "day_0_labels.npy", (random.random((len(ids), 1)) < 0.25).astype(np.int32))
    adopt(path, table_size=[rows_per_table] * NUM_TABLES, val_fraction=4 * BATCH / len(ids))


def train_child(options: argparse.Namespace) -> None:
    from recmill import train

    shape, rows = SHAPES[options.shape], options.rows_per_table
    tables: dict[str, Any] = {}
    if options.child == "train_4x":
        budget = NUM_TABLES * rows * (shape.dim + 1)  # a quarter of 4 bytes
        tables = {"store": "cached_ssd", "cache_memory_budget_mb": budget >> 20, "path": str(options.times.parent)}
    config = {
        "data": {"path": str(options.times.parent / "rows"), "limit_val_batches": 1, "limit_test_batches": 1},
        "model": {"name": "dlrm", "embedding_dim": shape.dim, "bottom_mlp": shape.bottom, "top_mlp": shape.top},
        "optim": {"dense": {"name": "sgd", "lr": 0.01}, "tables": {"name": "rowwise_adagrad", "lr": 0.01}},
        "train": {"device": "cpu", "global_batch_size": BATCH, "num_epochs": 10**6, "log_every_steps": 1},
        "eval": {"every_steps": 10**9},
        "checkpoint": {"every_steps": 10**9},
        "tables": tables,
    }
    train(config, options.times, procs=1)


def start(name: str, options: argparse.Namespace, shape: str, ids: str, folder: Path) -> Contender:
    times = folder / name
    command = [sys.executable, __file__, "--child", name, "--shape", shape, "--ids", ids, "--times", str(times)]
    for option in ("batches", "rows_per_table"):
        command += [f"--{option.replace('_', '-')}", str(getattr(options, option))]
    run = [command], [{**TUNING, **os.environ}], folder / f"{name}.txt"
    if name in CONTENDERS:
        return LimitedContender(name, *run, partial(noted_times, times), partial(noted_work, times))
    if not (folder / "rows").exists():
        write_rows(folder / "rows", options.rows_per_table, ids == "hashed")
    work = lambda reports: Work(BATCH * (reports.stop - reports.start))  # noqa: E731
    return Contender(name, *run, partial(our_times, times), work, first_steps=TRAIN_ROWS // BATCH)


def compare(options: argparse.Namespace, shape: str, ids: str) -> dict[str, int]:
    """Return samples per second, and print them with what they are compared with."""
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="store-") as name:
        folder = Path(name)
        names = [name for name in options.contenders.split(",") if (name, shape) not in IMPOSSIBLE]
        contenders = (start(name, options, shape, ids, folder) for name in names)
        turns, memory = run_all(contenders, options.rounds, options.seconds)
        facts = {path.stem: path.read_text() for path in folder.glob("*.facts")}
    rates = {name: [turn.samples for turn in of] for name, of in turns.items()}
    medians = {name: round(statistics.median(of)) for name, of in rates.items()}
    print(f"{shape}, ids {ids}: samples/s, share of the same in memory, peak memory of the store")
    for name, of in rates.items():
        reference = "train" if name.startswith("train") else "device_mem"
        share = f"{median_ratio(of, rates[reference]):6.1%}" if reference in rates else ""
        peak = f"{memory[name]:6,} MB" + (" (whole process)" if name.startswith("train") else "")
        print(f"  {name:17} {medians[name]:8,} {share} {peak}  {facts.get(name, '')}", flush=True)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="dim128,dim16")
    parser.add_argument("--ids", default="frequency,hashed")
    parser.add_argument("--contenders", default=",".join((*CONTENDERS, "train", "train_4x")))
    parser.add_argument(
        "--rows-per-table", type=int, default=200_000, help="At least 40,000: a sixteenth holds a batch."
    )
    parser.add_argument("--batches", type=int, default=400, help="Different ones.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="Length of each turn.")
    parser.add_argument("--directory", default=".", help="On the disk to measure.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options) if options.child in CONTENDERS else train_child(options)
        return
    disk = measure_disk(Path(options.directory))
    print("disk:", *(f"{reads.engine} depth {reads.depth}: {reads}" for reads in disk.reads), sep="\n  ")
    rates: dict[str, dict[str, int]] = {name: {} for name in options.contenders.split(",")}
    for shape in options.shape.split(","):
        for ids in options.ids.split(","):
            for name, rate in compare(options, shape, ids).items():
                rates[name][f"{shape}/{ids}"] = rate
    reads_per_second = round(max(reads.per_second for reads in disk.reads))
    print(json.dumps({"benchmark": "store", **rates, "disk_reads": reads_per_second}))


if __name__ == "__main__":
    main()
