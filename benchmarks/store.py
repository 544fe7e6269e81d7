"""Measure samples per second of DLRM steps with tables larger than memory, in each kind of store.

device_mem       all rows in memory: the reference
cached_ssd_4x    our cache, with a budget of a quarter of the tables; _16x: a sixteenth; _fits: larger than the tables
cached_ssd_first the quarter, from tables that were never trained; for the others, every row was written before
mmap_4x          the tables in a mapped file, used in place by the same kernels
lmdb_4x, rocksdb_4x, sqlite_4x    the rows of a step are read from a database and written back
python_lru_4x    a dictionary of recently used rows in Python, over a mapped file

All do the same step with the same kernels, and differ in where the rows are. Row-wise Adagrad; ids follow Zipf's law
with exponent 1.05, numbered by frequency or hashed. Each contender runs in its own process. What the process takes more
with the store than without is limited by a control group to the budget and 128 MB. The peers' packages are in
requirements/store.txt.
"""

import argparse
import json
import mmap
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from recmill import rng
from recmill.kernels.layers import use_kernels
from recmill.kernels.library import KernelLibrary, load_library
from recmill.launch.local import TUNING
from recmill.nn.interactions import DotInteraction
from recmill.nn.mlp import mlp
from recmill.tables.stores.disk_probe import measure_disk
from recmill.tables.stores.row_cache import RowCache, RowLayout, Shard, plan_cache

NUM_TABLES = 26
NUM_DENSE = 13
BATCH = 2048
ZIPF = 1.05
WARM_UP = 8  # steps
SLACK_BYTES = 128 << 20
CHUNK = 1 << 13  # rows written at a time before the measurement
CGROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


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
        threading.Thread(target=self._hint, daemon=True).start()

    def _hint(self) -> None:
        for batch, keys in enumerate(self._batches):
            with self._pinned:
                while batch > self._step and not self.cache.hint(batch, keys):
                    self._pinned.wait()

    def begin(self, step: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        slots = self.cache.pin(keys, step)
        with self._pinned:
            self._step = step
            self._pinned.notify()
        return self.cache.weights, self.cache.state, slots

    def end(self) -> None:
        self.cache.unpin()

    def facts(self) -> str:
        seen = self.cache.counters()
        return (
            f"{self.cache.plan.slots:,} slots, hits {seen.hits / seen.rows:.0%}, misses {seen.misses / seen.rows:.0%}, "
            f"waited {seen.wait_seconds:.1f} s, horizon {seen.horizon}, {seen.disk_bytes / 1e6:,.0f} MB on disk"
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
        memory = weights, self.starts, state, self.starts, rows, torch.arange(NUM_TABLES)
        self.library.call("update_bags", *memory, *tables, gradient.contiguous(), 2, 0.01, 1e-8)
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


def limit_memory(size: int) -> bool:
    """Put this process into a control group that may use `size` bytes more; return whether that is possible."""
    for root, name in zip(CGROUPS, ("memory.limit_in_bytes", "memory.max"), strict=True):
        group = root / f"recmill-store-{os.getpid()}"
        try:
            group.mkdir()
            (group / name).write_text(str(size))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return True
        except OSError:
            continue
    return False


def child(arguments: argparse.Namespace) -> None:
    """Measure one contender; print the result as JSON."""
    kind, ratio, is_filled = CONTENDERS[arguments.child]
    shape, rows = SHAPES[arguments.shape], arguments.rows_per_table
    library = load_library()
    assert library
    dlrm = Dlrm(shape, library)
    batches = zipf_batches(WARM_UP + arguments.steps, rows, arguments.ids == "hashed")
    table_bytes = NUM_TABLES * rows * 4 * (shape.dim + 1)
    budget = int(table_bytes / ratio) if ratio else 0
    tiny = Setting(NUM_TABLES * rows // 50, shape.dim, 0, Path(), [], True)
    for keys in batches[:2]:
        dlrm.step(DeviceMem(tiny), 0, keys % tiny.rows)
    directory = Path(arguments.directory)
    is_limited = bool(budget) and limit_memory(budget + SLACK_BYTES)
    store = kind(Setting(NUM_TABLES * rows, shape.dim, budget, directory, batches, is_filled))
    for step in range(WARM_UP):
        dlrm.step(store, step, batches[step])
    start, steps = time.perf_counter(), 0
    while steps < arguments.steps and time.perf_counter() - start < arguments.seconds:
        dlrm.step(store, WARM_UP + steps, batches[WARM_UP + steps])
        steps += 1
    rate = steps * BATCH / (time.perf_counter() - start)
    facts = store.facts() if isinstance(store, CachedSsd) else f"{steps} steps"
    print(json.dumps({"rate": rate, "facts": facts, "is_limited": is_limited}), flush=True)
    os._exit(0)  # databases would write what is left


def measure(arguments: argparse.Namespace, contender: str, shape: str, ids: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", contender, "--shape", shape, "--ids", ids]
    for name in ("steps", "seconds", "rows_per_table"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="store-") as directory:
        process = subprocess.Popen(
            [*command, "--directory", directory], env={**TUNING, **os.environ}, stdout=subprocess.PIPE, text=True
        )
        output, _ = process.communicate()
        for root in CGROUPS:
            if (group := root / f"recmill-store-{process.pid}").is_dir():
                group.rmdir()
    if process.returncode:
        return {"rate": 0.0, "facts": f"ended with {process.returncode}", "is_limited": True}
    return dict(json.loads(output.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="dim128,dim16")
    parser.add_argument("--ids", default="frequency,hashed")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--rows-per-table", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=150, help="At most, after the first few.")
    parser.add_argument("--seconds", type=float, default=20.0, help="At most.")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--directory", default=".", help="On the disk to measure.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
    disk = measure_disk(Path(arguments.directory))
    print("disk:", *(f"{reads.engine} depth {reads.depth}: {reads}" for reads in disk.reads), sep="\n  ")
    rates: dict[str, dict[str, float]] = {name: {} for name in arguments.contenders.split(",")}
    for shape in arguments.shape.split(","):
        for ids in arguments.ids.split(","):
            print(f"{shape}, ids {ids}", flush=True)
            for name, of in rates.items():
                results = [measure(arguments, name, shape, ids) for _ in range(arguments.rounds)]
                rate = of[f"{shape}/{ids}"] = round(statistics.median(result["rate"] for result in results))
                reference = rates.get("device_mem", {}).get(f"{shape}/{ids}")
                share = f"{rate / reference:6.1%}" if reference else ""
                limit = "" if results[0]["is_limited"] or name == "device_mem" else ", memory not limited"
                print(f"  {name:17} {rate:8,} samples/s {share}  {results[0]['facts']}{limit}", flush=True)
    print(json.dumps({"benchmark": "store", **rates, "disk_reads": round(disk.reads[-1].per_second)}))


if __name__ == "__main__":
    main()
