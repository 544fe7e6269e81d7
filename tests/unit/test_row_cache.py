"""A cache of rows must behave like a dictionary, whatever is evicted, compacted, hinted or saved meanwhile."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from recmill import failpoints, rng
from recmill.errors import ConfigError, ResourceError
from recmill.kernels import library
from recmill.tables.stores import row_file
from recmill.tables.stores.row_cache import CachePlan, Engine, RowCache, RowLayout, Shard, Snapshot, plan_cache

ENGINES: tuple[Engine, ...] = ("io_uring", "threads")
BOUND = 0.3


def layout(*rows: int, dim: int = 5, state_columns: int = 1) -> RowLayout:
    shards = [Shard(n, 100 * i, rng.stream_key(7, "table", f"C{i}"), BOUND + i) for i, n in enumerate(rows)]
    return RowLayout(tuple(shards), dim, state_columns)


def small_plan(slots: int, segment_bytes: int = 4096) -> CachePlan:
    """Return a plan in which everything is evicted, and written in segments of a few records."""
    return CachePlan(slots, segment_bytes, 0, 0)


def first_rows(of: RowLayout) -> np.ndarray:
    """Return the first values of all keys, as first_values.py fills tables."""
    pieces = [
        rng.uniform_floats(shard.stream, shard.first_row * of.dim, shard.rows * of.dim, shard.bound)
        for shard in of.shards
    ]
    return np.concatenate(pieces).reshape(-1, of.dim)


class Model:
    """The rows as plain arrays, and which of them were trained at which position."""

    def __init__(self, of: RowLayout) -> None:
        self.weights = first_rows(of)
        self.state = np.zeros((of.rows, of.state_columns), np.float32)
        self.positions = np.full(of.rows, -1)
        self.position = 0

    def train(self, cache: RowCache, keys: np.ndarray, batch: int = -1) -> None:
        slots = cache.pin(keys, batch)
        assert (cache.weights[slots] == self.weights[keys]).all()
        assert (cache.state[slots] == self.state[keys]).all()
        unique = np.unique(keys)
        self.weights[unique] = np.sin(self.weights[unique] + np.float32(unique[:, None] % 7))
        self.state[unique] += 1
        self.positions[unique] = self.position
        cache.weights[slots], cache.state[slots] = self.weights[keys], self.state[keys]
        cache.unpin()

    def expected(self, since: int = 0) -> dict[int, tuple[bytes, bytes]]:
        keys = np.flatnonzero(self.positions >= since)
        return {int(key): (self.weights[key].tobytes(), self.state[key].tobytes()) for key in keys}


def contents(snapshot: Snapshot) -> dict[int, tuple[bytes, bytes]]:
    rows: dict[int, tuple[bytes, bytes]] = {}
    for chunk in snapshot:
        for key, weights, state in zip(chunk.keys.tolist(), chunk.weights, chunk.state, strict=True):
            assert key not in rows, f"key {key} is twice in a snapshot"
            rows[key] = weights.tobytes(), state.tobytes()
    return rows


def batches(seed: int, count: int, rows: int, size: int) -> list[np.ndarray]:
    """Return batches in which some keys are frequent and repeated."""
    random = np.random.default_rng(seed)
    return [(rows * random.random(size) ** 3).astype(np.int64) for _ in range(count)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("lookahead", "state_columns"), [(0, 1), (1, 0), (5, 5), (60, 1)])
def test_rows_are_those_of_a_dictionary(engine: Engine, lookahead: int, state_columns: int, tmp_path: Path) -> None:
    of = layout(200, 1, 300, state_columns=state_columns)
    model, random = Model(of), np.random.default_rng(lookahead)
    coming = batches(1, 400, of.rows, 30)
    saved: tuple[Snapshot, dict[int, tuple[bytes, bytes]]] | None = None
    positions = [0]
    hinted = 0
    with RowCache(of, small_plan(64), tmp_path, engine=engine, lookahead=max(1, lookahead)) as cache:
        for step, keys in enumerate(coming):
            hinted = max(hinted, step)
            while lookahead and hinted < len(coming) and cache.hint(hinted, coming[hinted]):
                hinted += 1
            model.train(cache, keys, step if lookahead else -1)
            if step % 5 == 0:
                some, before = random.integers(0, of.rows, 50), cache.counters()
                assert (cache.read(some) == model.weights[some]).all()
                assert cache.counters()[:4] == before[:4]
            if step % 40 == 20:
                since = int(random.choice(positions))
                saved = cache.snapshot(since), model.expected(since)
                model.position = saved[0].position
                positions.append(model.position)
            if step % 40 == 25 + step // 40 and saved:
                assert contents(saved[0]) == saved[1]
        assert contents(cache.snapshot()) == model.expected()
        counters = cache.counters()
    assert counters.lookups == 30 * len(coming)
    assert counters.rows == sum(len(np.unique(keys)) for keys in coming)
    assert counters.first_touches >= 300 and counters.misses > 1000 and counters.hits > 1000
    assert counters.trained_rows == len(model.expected())


def test_the_disk_stays_bounded_when_rows_are_written_again_and_again(tmp_path: Path) -> None:
    of = layout(2000, dim=16)
    model = Model(of)
    with RowCache(of, small_plan(200), tmp_path) as cache:
        for keys in batches(2, 1500, of.rows, 100):
            model.train(cache, keys)
        counters = cache.counters()
        largest = os.fstat(cache.file.fd).st_blocks * 512
        assert contents(cache.snapshot()) == model.expected()
    assert counters.bytes_written > 20 * 2000 * of.record_bytes
    assert max(largest, counters.disk_bytes) <= counters.live_bytes / 0.7 + 10 * 4096
    assert counters.bytes_written < 3 * (counters.misses + 2000) * of.record_bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_hint_train_and_save_at_the_same_time(engine: Engine, tmp_path: Path) -> None:
    of = layout(500, 2000, dim=8)
    model = Model(of)
    coming = batches(3, 300, of.rows, 200)
    pinned = threading.Condition()
    done = 0
    problems: list[object] = []

    def hint() -> None:
        for batch, keys in enumerate(coming):
            with pinned:
                while batch > done and not cache.hint(batch, keys):
                    pinned.wait()

    def check(snapshot: Snapshot, expected: dict[int, tuple[bytes, bytes]]) -> None:
        if contents(snapshot) != expected:
            problems.append(expected)

    with RowCache(of, small_plan(800, 8192), tmp_path, engine=engine) as cache:
        hints, saver = threading.Thread(target=hint, daemon=True), threading.Thread()
        hints.start()
        for step, keys in enumerate(coming):
            model.train(cache, keys, step)
            with pinned:
                done = step + 1
                pinned.notify_all()
            if not saver.is_alive():
                saver = threading.Thread(target=check, args=(cache.snapshot(), model.expected()))
                saver.start()
        saver.join()
        hints.join()
        assert contents(cache.snapshot()) == model.expected()
    assert not problems


def test_a_restored_cache_saves_only_what_changed_since_the_full_checkpoint(tmp_path: Path) -> None:
    of = layout(300)
    model = Model(of)
    with RowCache(of, small_plan(40), tmp_path) as first:
        for keys in batches(4, 20, 150, 30):
            model.train(first, keys)
        chunks = list(first.snapshot())
    with RowCache(of, small_plan(40), tmp_path) as second:
        for chunk in chunks:
            second.load(*chunk)
        since = model.position = second.advance()
        extreme = np.array([[0.0, -0.0, np.finfo(np.float32).max, 1e-45, -1.0]], np.float32)
        second.load(np.array([299]), extreme, np.array([3.0], np.float32))
        model.weights[299], model.state[299], model.positions[299] = extreme[0], 3, since
        for keys in batches(5, 20, 300, 30):
            model.train(second, keys)
        assert contents(second.snapshot(since)) == model.expected(since)
        assert contents(second.snapshot()) == model.expected()
        assert 0 < len(model.expected(since)) < len(model.expected())


def test_an_abandoned_snapshot_holds_nothing(tmp_path: Path) -> None:
    of = layout(300)
    model = Model(of)
    with RowCache(of, small_plan(40), tmp_path) as cache:
        for step, keys in enumerate(batches(6, 200, of.rows, 30)):
            model.train(cache, keys)
            if step % 10 == 0:
                snapshot = cache.snapshot()
                if step % 20 == 0:
                    next(iter(snapshot))
                snapshot.close()
        assert contents(cache.snapshot()) == model.expected()
        assert cache.counters().disk_bytes <= cache.counters().live_bytes / 0.7 + 10 * 4096


def fill(cache: RowCache, rows: int = 3000) -> None:
    """Train more rows than fit in memory, so that most of them are in the file."""
    order = np.random.default_rng(cache.counters().lookups).permutation(rows)
    for first in range(0, rows, 40):
        cache.pin(order[first : first + 40])
        cache.unpin()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_flipped_bit_is_an_error_and_not_a_wrong_row(engine: Engine, tmp_path: Path) -> None:
    with RowCache(layout(3000), small_plan(40), tmp_path, engine=engine) as cache:
        fill(cache)
        block = bytearray(os.pread(os.open(f"/proc/self/fd/{cache.file.fd}", os.O_RDONLY), 4096, 0))
        block[20] ^= 4
        writable = os.open(f"/proc/self/fd/{cache.file.fd}", os.O_WRONLY)
        os.pwrite(writable, block, 0)
        with pytest.raises(ResourceError, match=f"{tmp_path}: the row file is corrupt at byte 0: a row's checksum"):
            for key in range(0, 3000, 10):
                cache.pin(np.arange(key, key + 10))
                cache.unpin()
        with pytest.raises(ResourceError, match="corrupt"):
            cache.read(np.arange(3))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("store.read@hit=30:eio", "reading at byte .*: Input/output error. The disk reports an error"),
        ("store.append@hit=2:nospace", "writing at byte .*: No space left on device. The disk is full"),
        ("store.compact:eio", "reading at byte .*: Input/output error"),
        ("store.snapshot:eio", "reading at byte .*: Input/output error"),
    ],
)
def test_a_failing_disk_names_the_directory(
    engine: Engine, failure: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECMILL_FAIL", failure)
    failpoints.active_failures.cache_clear()
    try:
        with (
            RowCache(layout(3000), small_plan(40), tmp_path, engine=engine) as cache,
            pytest.raises(ResourceError, match=f"{tmp_path}: the row file: {message}"),
        ):
            for _ in range(5):
                fill(cache)
            cache.snapshot()
    finally:
        failpoints.active_failures.cache_clear()


def test_a_disk_budget_that_is_used_up_is_an_error(tmp_path: Path) -> None:
    with RowCache(layout(4000), small_plan(40), tmp_path, disk_budget_bytes=64 << 10) as cache:
        fill(cache, 500)
        with pytest.raises(ResourceError, match=r"needs 1 MB, but tables\.disk_budget_gb allows 1 MB\. Raise"):
            fill(cache, 4000)


def test_a_batch_with_more_rows_than_slots_says_what_to_raise(tmp_path: Path) -> None:
    model = Model(of := layout(4000))
    with RowCache(of, small_plan(64), tmp_path) as cache:
        with pytest.raises(ResourceError, match=r"A batch with 65 lookups .* can hold \(64\).* by 1 to be sure"):
            cache.pin(np.arange(65))
        cache.unpin()
        with pytest.raises(IndexError, match=r"key 4000 is not in 0\.\.3999"):
            cache.pin(np.array([0, 4000]))
        cache.unpin()
        assert (cache.read(np.arange(100)) == model.weights[:100]).all()
        assert cache.pin(np.array([], np.int64)).shape == cache.read(np.array([], np.int64))[:, 0].shape == (0,)


def test_a_budget_counts_every_byte_and_says_how_much_is_missing(tmp_path: Path) -> None:
    of = layout(50_000, dim=32)
    plan = plan_cache(of, 4 << 20, min_slots=1000)
    with RowCache(of, plan, tmp_path) as cache:
        assert cache.memory_bytes() > 0.8 * (4 << 20)  # buffers are planned for the largest alignment
        assert cache.memory_bytes() <= plan.memory_bytes <= 4 << 20
    assert plan_cache(of, 1 << 30).slots == 50_000  # never more than all
    with pytest.raises(
        ConfigError, match=r"cache_memory_budget_mb: 4 MB for 50,000 rows of width 32 is 5 MB too little"
    ):
        plan_cache(of, 4 << 20, min_slots=50_000)
    with pytest.raises(ConfigError, match="more than a row file can hold"):
        plan_cache(layout(2**31, dim=32), 1 << 40)


def test_rows_that_all_fit_are_never_written(tmp_path: Path) -> None:
    model = Model(of := layout(300))
    with RowCache(of, plan_cache(of, 16 << 20), tmp_path) as cache:
        for keys in batches(7, 50, of.rows, 60):
            model.train(cache, keys)
        assert cache.counters().bytes_written == cache.counters().disk_bytes == cache.counters().misses == 0
        assert contents(cache.snapshot()) == model.expected()


def test_files_without_direct_access_and_without_namelessness_work_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def buffered(directory: Path, direct: int) -> int | None:
        return None if direct else real(directory, direct)

    real = row_file._open
    monkeypatch.setattr(row_file, "_open", buffered)
    monkeypatch.setattr(os, "O_TMPFILE", 1 << 30)  # unknown: the directory cannot be opened for writing
    model = Model(of := layout(300))
    with RowCache(of, small_plan(40), tmp_path) as cache:
        assert not cache.file.is_direct
        for keys in batches(8, 100, of.rows, 30):
            model.train(cache, keys)
        assert contents(cache.snapshot()) == model.expected()
        assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_hold_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tables.path: .*/missing does not exist. Create it on a local SSD"):
        row_file.check_row_directory(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        row_file.check_row_directory(tmp_path / "file")
    with pytest.raises(ConfigError, match="/dev/shm is a tmpfs, which is memory"):
        row_file.check_row_directory(Path("/dev/shm"))
    row_file.check_row_directory(Path("/usr"))


def test_a_missing_compiler_is_a_resource_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    library.load_rows_library.cache_clear()
    with pytest.raises(ResourceError, match=r"'cached_ssd' needs .*: no C\+\+ compiler .*Install g\+\+"):
        RowCache(layout(3), small_plan(3), tmp_path)
    library.load_rows_library.cache_clear()


# Trains rows in a process in which system call 425, io_uring_setup, fails as in a container.
WITHOUT_IO_URING = """
import ctypes, struct, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from tests.unit.test_row_cache import Model, batches, contents, layout, small_plan
from recmill.tables.stores.row_cache import RowCache
program = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0
model = Model(of := layout(300))
with RowCache(of, small_plan(40), Path(sys.argv[2])) as cache:
    assert cache.engine == "threads"
    for keys in batches(9, 50, of.rows, 30):
        model.train(cache, keys)
    assert contents(cache.snapshot()) == model.expected()
try:
    RowCache(of, small_plan(40), Path(sys.argv[2]), engine="io_uring")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_threads_read_where_io_uring_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_IO_URING, str(Path(__file__).parents[2]), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout.startswith("ResourceError This system does not allow io_uring"), ended.stderr


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit.test_row_cache import fill, layout, small_plan
from recmill.tables.stores.row_cache import RowCache
with RowCache(layout(3000), small_plan(40), Path(sys.argv[2])) as cache:
    for _ in range(20):
        fill(cache)
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parents[2]), str(tmp_path)]
    ended = subprocess.run(command, env={**os.environ, "RECMILL_FAIL": "store.compact:kill"}, capture_output=True)
    assert ended.returncode == -9, ended.stderr
    assert list(tmp_path.iterdir()) == []
