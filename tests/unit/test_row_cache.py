"""A cache of rows must behave like a dictionary, whatever is evicted, compacted, hinted or saved meanwhile."""

import errno
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
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
        chunks = [[values.copy() for values in chunk] for chunk in first.snapshot()]
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


def test_rows_that_are_loaded_after_a_snapshot_began_are_not_in_it(tmp_path: Path) -> None:
    """As when a row of a dynamic table gets another id. A third of the rows are in memory, the others in the file."""
    model = Model(of := layout(300))
    with RowCache(of, small_plan(100), tmp_path) as cache:
        for first in range(0, 300, 30):
            model.train(cache, np.arange(first, first + 30))
        expected = model.expected()
        snapshot = cache.snapshot()
        cache.load(np.arange(300), np.full((300, of.dim), 7, np.float32), np.full(300, 8, np.float32))
        assert contents(snapshot) == expected
        assert (cache.read(np.arange(300)) == 7).all()


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
        ("store.append@hit=2:quota", "writing at byte .*: Disk quota exceeded. Your quota is used up: free some space"),
        ("store.compact:eio", "reading at byte .*: Input/output error"),
        ("store.snapshot:eio", "reading at byte .*: Input/output error"),
    ],
)
def test_a_failing_disk_names_the_directory(
    engine: Engine, failure: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_failure(monkeypatch, failure)
    with (
        RowCache(layout(3000), small_plan(40), tmp_path, engine=engine) as rows,
        pytest.raises(ResourceError, match=f"{tmp_path}: the row file: {message}"),
    ):
        for _ in range(5):
            fill(rows)
        rows.snapshot()


def test_a_disk_that_fails_when_the_file_is_closed_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_close(fd: int, close: Callable[[int], None] = os.close) -> None:
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    cache = RowCache(layout(3000), small_plan(40), tmp_path)
    fill(cache)
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", failing_close)
        cache.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(cache.file.fd)


def test_a_disk_budget_that_is_used_up_is_an_error(tmp_path: Path) -> None:
    with RowCache(layout(4000), small_plan(40), tmp_path, disk_budget_bytes=64 << 10) as cache:
        fill(cache, 500)
        with pytest.raises(ResourceError, match=r"needs 1 MB, but tables\.disk_budget_gb allows 0 MB\. Raise"):
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
        assert cache.memory_bytes() > 0.7 * (4 << 20)  # besides what a snapshot needs, and larger alignments
        assert cache.memory_bytes() <= plan.memory_bytes <= 4 << 20
    assert plan_cache(of, 1 << 30).slots == 50_000  # never more than all
    with pytest.raises(
        ConfigError, match=r"cache_memory_budget_mb: 4 MB for 50,000 rows of width 32 is 7 MB too little"
    ):
        plan_cache(of, 4 << 20, min_slots=50_000)
    for budget in (1 << 20, 3 << 20, 4 << 20):  # what the error says is enough, and 1 MB less is not
        with pytest.raises(ConfigError, match="Set it to at least") as refused:
            plan_cache(of, budget, min_slots=50_000)
        least = int(str(refused.value).split("at least ")[1].split(",")[0]) << 20
        assert plan_cache(of, least, min_slots=50_000).slots == 50_000
        with pytest.raises(ConfigError):
            plan_cache(of, least - (1 << 20), min_slots=50_000)
    with pytest.raises(ConfigError, match=r"2 MB for 2,000,000 rows .*: 10 MB for the index of all rows"):
        plan_cache(layout(2_000_000), 2 << 20)
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
    for path in (Path("/proc"), Path("/sys")):  # nobody can make files there
        with pytest.raises(ResourceError, match=f"tables.path: {path}: a row file cannot be written there: .*hoose"):
            row_file.check_row_directory(path)
    if row_file.file_system(tmp_path) != "tmpfs":
        row_file.check_row_directory(tmp_path)


def test_a_missing_compiler_is_a_resource_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    library.load_rows_library.cache_clear()
    with pytest.raises(ResourceError, match=r"'cached_ssd' and .* need .*: no C\+\+ compiler .*Install"):
        RowCache(layout(3), small_plan(3), tmp_path)
    library.load_rows_library.cache_clear()


def run_script(
    script: str, folder: Path, *arguments: str, fail: str = "", prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own; its arguments are the repository, a folder and these."""
    command = [*prefix, sys.executable, "-c", script, str(Path(__file__).parents[2]), str(folder), *arguments]
    return subprocess.run(command, env={**os.environ, "RECMILL_FAIL": fail}, capture_output=True, text=True)


# Trains rows in a process in which system call 425, io_uring_setup, fails as in a container.
WITHOUT_IO_URING = """
import ctypes, struct, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from tests.unit.test_row_cache import Model, batches, contents, layout, small_plan
from recmill.tables.stores.row_cache import RowCache
program = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 + int(sys.argv[3])), (0x06, 0, 0, 0x7fff0000)]
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


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_threads_read_where_io_uring_is_refused(error: int, tmp_path: Path) -> None:
    ended = run_script(WITHOUT_IO_URING, tmp_path, str(error))
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
    ended = run_script(KILLED, tmp_path, fail="store.compact:kill")
    assert ended.returncode == -9, ended.stderr
    assert list(tmp_path.iterdir()) == []


# Trains rows until a file may not grow any more; then tries to begin where not even a byte may be written.
LIMITED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit.test_row_cache import fill, layout, small_plan
from recmill.errors import ResourceError
from recmill.tables.stores import row_file
from recmill.tables.stores.row_cache import RowCache
cache = RowCache(layout(3000), small_plan(40), Path(sys.argv[2]))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (40000, hard))
for begin in (lambda: fill(cache), lambda: row_file.check_row_directory(Path(sys.argv[2]))):
    try:
        begin()
    except ResourceError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
"""


def test_a_limit_of_the_file_size_is_an_error_that_names_it(tmp_path: Path) -> None:
    ended = run_script(LIMITED, tmp_path)
    while_training, at_the_start = ended.stdout.splitlines()
    assert f"{tmp_path}: the row file: writing at byte 36,864: File too large. A file may not be" in while_training
    assert f"{tmp_path}: a row file cannot be written there: File too large. A file may not be" in at_the_start


# Trains rows on a disk of 256 kB; then tries to begin on one that is read-only.
FULL = """
import subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit.test_row_cache import fill, layout, small_plan
from recmill.errors import ResourceError
from recmill.tables.stores import row_file
from recmill.tables.stores.row_cache import RowCache
folder = Path(sys.argv[2])
for name in ("full", "fixed"):
    (folder / name).mkdir()
mount = lambda *arguments: subprocess.run(["mount", *arguments], check=True)
mount("-t", "tmpfs", "-o", "size=256k", "none", folder / "full")
mount("--bind", folder / "fixed", folder / "fixed")
mount("-o", "remount,bind,ro", folder / "fixed")
cache = RowCache(layout(30000), small_plan(40), folder / "full")
for begin in (lambda: fill(cache, 30000), lambda: row_file.check_row_directory(folder / "fixed")):
    try:
        begin()
    except ResourceError as error:
        print(error)
"""


def own_mounts(folder: Path) -> list[str]:
    """Return a command that runs another one with mounts of its own in `folder`, or skip the test."""
    if row_file.file_system(folder) == "tmpfs":
        pytest.skip(f"{folder} is in memory: choose a disk with --basetemp")
    command = ["unshare", "-Urm"]
    if not shutil.which("unshare") or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounts of one's own (unshare -Urm): allow user namespaces")
    return command


def test_a_disk_that_is_really_full_and_one_that_is_read_only_are_named(tmp_path: Path) -> None:
    ended = run_script(FULL, tmp_path, prefix=own_mounts(tmp_path))
    while_training, at_the_start = ended.stdout.splitlines() or ["", ended.stderr]
    assert f"{tmp_path}/full: the row file: writing at byte " in while_training
    assert "No space left on device. The disk is full: free some space" in while_training
    refused = f"{tmp_path}/fixed: a row file cannot be written there: Read-only file system. The file system is"
    assert refused in at_the_start


# Trains rows in an overlay, as the root directory of a container is one.
OVERLAY = """
import subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.unit.test_row_cache import Model, batches, contents, layout, small_plan
from recmill.tables.stores import row_file
from recmill.tables.stores.row_cache import RowCache
folder = Path(sys.argv[2])
for name in ("lower", "upper", "work", "merged"):
    (folder / name).mkdir()
layers = ",".join(f"{layer}dir={folder / layer}" for layer in ("lower", "upper", "work"))
subprocess.run(["mount", "-t", "overlay", "-o", f"userxattr,{layers}", "none", folder / "merged"], check=True)
row_file.check_row_directory(folder / "merged")
model = Model(of := layout(300))
with RowCache(of, small_plan(40), folder / "merged") as cache:
    for keys in batches(8, 100, of.rows, 30):
        model.train(cache, keys)
    assert contents(cache.snapshot()) == model.expected()
    print(row_file.file_system(folder / "merged"), cache.counters().misses > 500)
"""


def test_rows_are_kept_in_an_overlay_file_system_too(tmp_path: Path) -> None:
    ended = run_script(OVERLAY, tmp_path, prefix=own_mounts(tmp_path))
    assert ended.stdout == "overlay True\n", ended.stderr
    assert [*(tmp_path / "upper").iterdir()] == []


# Waits for a disk that does not answer, watched by the watchdog.
HANGING = """
import os, sys
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[1])
from tests.unit.test_row_cache import layout, small_plan
from recmill.launch.watchdog import Heartbeat, Watch, watching
from recmill.tables.stores.row_cache import RowCache
def end(hang):
    print(hang, flush=True)
    os._exit(0)
heart = Heartbeat()
cache = RowCache(layout(3000), small_plan(40), Path(sys.argv[2]), engine=sys.argv[3])
order = np.random.default_rng(1).permutation(3000)
with watching(heart, Watch(3, 2.0, Path(sys.argv[2]), None), end):
    for first in range(0, 2 * 3000, 40):
        heart.beat("training", 7)
        cache.pin(order[first % 3000 :][:40])
        cache.unpin()
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_disk_that_does_not_answer_is_named_by_the_watchdog(engine: Engine, tmp_path: Path) -> None:
    ended = run_script(HANGING, tmp_path, engine, fail="store.read:hang")
    assert ended.stdout.startswith("rank 3 made no progress for "), ended.stderr
    assert "training, waiting for the disk of cached_ssd (tables.path), after step 7" in ended.stdout


# Trains, reads and saves with a budget of 24 MB, and prints the peak of memory that this took, and what of the row file
# the page cache holds.
BUDGETED = """
import ctypes, mmap, os, re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import numpy as np
from tests.unit.test_row_cache import layout
from recmill.kernels.library import load_rows_library
from recmill.tables.stores.row_cache import RowCache, plan_cache
def peak():
    return int(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10
load_rows_library()
of = layout(200_000, dim=128)
keys = np.random.default_rng(1).permutation(of.rows)
before = peak()
with RowCache(of, plan_cache(of, 24 << 20), Path(sys.argv[2])) as cache:
    for first in range(0, of.rows, 1000):
        cache.weights[cache.pin(keys[first : first + 1000])] += 1
        cache.unpin()
    for first in range(0, of.rows, 1000):
        cache.read(keys[first : first + 1000])
    saved = sum(len(chunk.keys) for chunk in cache.snapshot())
    used = peak() - before
    size = os.fstat(cache.file.fd).st_size
    mapped = mmap.mmap(cache.file.fd, size)
    resident = (ctypes.c_ubyte * (size >> 12))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), resident) == 0
    print(saved, used, size, sum(page & 1 for page in resident) << 12)
"""


def test_peak_memory_stays_within_the_budget_and_the_page_cache_is_not_used(tmp_path: Path) -> None:
    """A table of four times the budget: 200,000 rows of 516 bytes."""
    if row_file.file_system(tmp_path) == "tmpfs":
        pytest.skip(f"{tmp_path} is in memory: choose a disk with --basetemp")
    ended = run_script(BUDGETED, tmp_path)
    saved, used, size, in_page_cache = map(int, ended.stdout.split())
    assert saved == 200_000
    assert size > 3.5 * (24 << 20)
    assert used <= 1.02 * (24 << 20) + (2 << 20)  # and what a batch and Python take
    assert in_page_cache <= 1 << 20


def with_failure(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    monkeypatch.setenv("RECMILL_FAIL", entry)
    monkeypatch.setattr(failpoints, "active_failures", functools.cache(failpoints.active_failures.__wrapped__))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "entry",
    [
        *("store.read:short", "store.read:eintr", "store.append:short", "store.append@hit=2:eintr"),
        *("store.read@hit=9:slow", "store.compact@hit=1:slow", "store.snapshot:slow"),
    ],
)
def test_interrupted_short_and_slow_reads_and_writes_change_no_row(
    engine: Engine, entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_failure(monkeypatch, entry)
    model = Model(of := layout(300, dim=200))  # a row needs several sectors
    with RowCache(of, small_plan(40, 16384), tmp_path, engine=engine) as rows:
        for keys in batches(10, 60, of.rows, 30):
            model.train(rows, keys)
        assert contents(rows.snapshot()) == model.expected()
        assert rows.counters().misses > 500


def test_disks_with_blocks_of_4096_bytes_work_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_file, "_direct_alignment", lambda fd: 4096)
    model = Model(of := layout(300))
    with RowCache(of, small_plan(40), tmp_path) as rows:
        for keys in batches(11, 60, of.rows, 30):
            model.train(rows, keys)
        assert contents(rows.snapshot()) == model.expected()


def test_two_caches_share_a_directory_that_may_even_be_removed(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    of = layout(300)
    models = Model(of), Model(of)
    with RowCache(of, small_plan(40), folder) as one, RowCache(of, small_plan(40), folder) as other:
        for step, (a, b) in enumerate(zip(batches(12, 60, of.rows, 30), batches(13, 60, of.rows, 30), strict=True)):
            models[0].train(one, a)
            models[1].train(other, b)
            if step == 20:
                folder.rmdir()
        assert contents(one.snapshot()) == models[0].expected()
        assert contents(other.snapshot()) == models[1].expected()


def test_the_order_of_eviction_changes_no_row(tmp_path: Path) -> None:
    of = layout(300)
    misses = set()
    for seed in (1, 2, 3):
        model = Model(of)
        with RowCache(of, small_plan(40), tmp_path, eviction_seed=seed) as rows:
            for keys in batches(14, 60, of.rows, 30):
                model.train(rows, keys)
            assert contents(rows.snapshot()) == model.expected()
            misses.add(rows.counters().misses)
    assert len(misses) > 1


def test_rows_trained_to_zero_minus_zero_and_the_largest_number_stay_so(tmp_path: Path) -> None:
    """A row of zeros is not mistaken for one that was never trained."""
    of = layout(300, state_columns=5)
    values = np.array([0.0, -0.0, np.finfo(np.float32).max, -np.finfo(np.float32).max, 1e-45], np.float32)
    with RowCache(of, small_plan(40), tmp_path) as rows:
        for first in range(0, 300, 30):
            slots = rows.pin(np.arange(first, first + 30))
            rows.weights[slots] = rows.state[slots] = values[(np.arange(first, first + 30) // 5 % 5)][:, None]
            rows.unpin()
        for first in range(0, 300, 30):  # most of them from the file
            slots = rows.pin(np.arange(first, first + 30), for_update=False)
            expected = np.repeat(values[(np.arange(first, first + 30) // 5 % 5)], 5).tobytes()
            assert rows.weights[slots].tobytes() == rows.state[slots].tobytes() == expected
            rows.unpin()
        assert rows.counters().misses > 200
        assert len(contents(rows.snapshot())) == 300


@pytest.mark.parametrize("engine", ENGINES)
def test_hinted_batches_that_never_come_change_nothing(engine: Engine, tmp_path: Path) -> None:
    """As when training stops early: the hints are dropped, or the cache is closed while their rows are being read."""
    of = layout(300)
    model = Model(of)
    with RowCache(of, small_plan(60), tmp_path, engine=engine) as rows:
        for start in (0, 1000, 500):
            coming = batches(15 + start, 20, of.rows, 20)
            for number, keys in enumerate(coming):
                rows.hint(start + number, keys)
            for number in range(5):
                model.train(rows, coming[number], start + number)
            if start == 0:
                rows.drop_hints()
        for keys in batches(16, 20, of.rows, 30):
            model.train(rows, keys)
        assert contents(rows.snapshot()) == model.expected()
        rows.hint(2000, np.arange(0, 300, 6))


def test_looking_ahead_needs_few_more_rows_than_a_cache_that_knows_the_complete_future(tmp_path: Path) -> None:
    of, slots = layout(20_000, dim=4), 5000
    coming = batches(21, 200, of.rows, 500)
    with RowCache(of, small_plan(slots, 1 << 16), tmp_path) as rows:
        hinted = 0
        for number, keys in enumerate(coming):
            while hinted < len(coming) and rows.hint(hinted, coming[hinted]):
                hinted += 1
            rows.pin(keys, number)
            rows.unpin()
        seen = rows.counters()
    # Belady: those rows leave that are needed latest.
    next_uses, next_use = [], np.full(of.rows, len(coming))
    for number, keys in reversed([*enumerate(coming)]):
        next_uses.append(next_use[keys])
        next_use[keys] = number
    optimal, cached = 0, np.full(of.rows, -1)
    for keys in coming:
        optimal += int(np.count_nonzero(cached[np.unique(keys)] < 0))
        cached[keys] = next_uses.pop()
        held = np.flatnonzero(cached >= 0)
        cached[held[np.argsort(-cached[held])[: max(0, len(held) - slots)]]] = -1
    assert seen.misses + seen.first_touches < 1.2 * optimal


def test_a_file_without_garbage_needs_exactly_its_disk_budget(tmp_path: Path) -> None:
    """40 of 3,000 rows stay in slots; 113 records of 36 bytes fit in a segment."""
    model = Model(of := layout(3000))
    needed = 4096 * -(-2960 // 113)
    for budget in (needed, needed - 1):
        with RowCache(of, small_plan(40), tmp_path, disk_budget_bytes=budget) as rows:
            try:
                rows.load(np.arange(3000), model.weights, model.state)
            except ResourceError as error:
                assert budget < needed and "tables.disk_budget_gb allows" in str(error)
            else:
                assert budget == needed
                assert (rows.read(np.arange(3000)) == model.weights).all()


def reads(of: RowLayout, slots: int, coming: list[np.ndarray], lookahead: int, path: Path) -> tuple[int, list[float]]:
    """Return the rows read, of many batches in the second half, and forecasts for 1.5 and 2.5 times the slots."""
    with RowCache(of, small_plan(slots, 1 << 19), path) as rows:
        hinted = earlier = 0
        for number, keys in enumerate(coming):
            while lookahead and hinted < len(coming) and rows.hint(hinted, coming[hinted]):
                hinted += 1
            if number == len(coming) // 2 > 100:
                earlier = rows.counters().misses
            rows.pin(keys, number if lookahead else -1)
            rows.unpin()
        return rows.counters().misses - earlier, [rows.forecast(int(slots * factor)) for factor in (1.5, 2.5)]


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("count", [60, 240])  # all in the trace; only the latest in it
def test_the_reads_of_a_larger_cache_are_forecast(lookahead: int, count: int, tmp_path: Path) -> None:
    of, slots = layout(20_000, dim=4), 3000
    coming = batches(31, count, of.rows, 600)
    now, forecasts = reads(of, slots, coming, lookahead, tmp_path)
    larger = [reads(of, int(slots * factor), coming, lookahead, tmp_path)[0] for factor in (1.5, 2.5)]
    assert forecasts == pytest.approx([misses / now for misses in larger], abs=0.1)
    assert reads(of, slots, coming, lookahead, tmp_path)[1] == forecasts  # whatever the threads did
