import subprocess
import sys
from pathlib import Path

import pytest

from recmill.launch.watchdog import Hang, culprit

WAITING = "/site-packages/torch/distributed/distributed_c10d.py:1 all_reduce: work.wait()"
BACKWARD = "/site-packages/torch/autograd/graph.py:1 _engine_run_backward: run()"
AT_WORK = "/src/recmill/data/clicks.py:1 read: file.read()"


def hang(rank: int, innermost: str, step: int = 7) -> Hang:
    return Hang(rank, step, "training", 3.0, [WAITING, AT_WORK, AT_WORK, innermost])


@pytest.mark.parametrize(
    ("hangs", "silent", "expected"),
    [
        ([hang(0, WAITING), hang(1, AT_WORK), hang(2, WAITING)], [], 1),
        ([hang(0, WAITING), hang(1, AT_WORK)], [2], 1),  # it tells its own story; the silent one may be slow
        ([hang(0, WAITING), hang(1, WAITING)], [2], 2),
        ([hang(0, WAITING), hang(1, BACKWARD)], [2], 2),  # a collective inside backward shows no frame of its own
        ([hang(0, WAITING), hang(1, BACKWARD)], [], 1),
        ([hang(0, WAITING, step=8), hang(1, WAITING, step=7)], [], 1),  # all wait: for the one that is behind
    ],
)
def test_the_rank_that_the_others_wait_for_is_found(hangs: list[Hang], silent: list[int], expected: int) -> None:
    assert culprit(hangs, silent) == expected


def test_a_wait_is_told_by_the_innermost_frames_alone() -> None:
    assert [hang(0, frame).waits for frame in (AT_WORK, BACKWARD, WAITING)] == [0, 1, 2]


@pytest.mark.parametrize("library", ["PyDLL", "CDLL"])
def test_a_process_that_hangs_tells_where_and_ends_even_if_it_never_gives_python_s_lock_back(
    library: str, tmp_path: Path
) -> None:
    """ctypes calls through PyDLL keep the lock: Python's other threads stand still."""
    code = (
        "import ctypes, sys\n"
        "from pathlib import Path\n"
        "from recmill.launch import watchdog\n"
        "watchdog._LINGER_SECONDS = 0\n"
        "run = Path(sys.argv[1])\n"
        "with watchdog.watching(3, 1.0, run, run, lambda hang: print(hang.told())):\n"
        "    watchdog.beat('testing', 5)\n"
        "    watchdog.time.sleep(0.6)\n"
        f"    ctypes.{library}(None).sleep(100)\n"
    )
    command = [sys.executable, "-u", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    if library == "PyDLL":
        assert "Timeout" in done.stderr
        assert not list(tmp_path.iterdir())
    else:
        assert done.stdout.startswith("rank 3 made no progress for 1")
        assert "testing, after step 5" in (tmp_path / "hang-rank-3.txt").read_text()
        assert (tmp_path / "hang-3.json").is_file()
