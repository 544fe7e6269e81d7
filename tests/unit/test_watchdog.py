import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from recmill.files.atomic import write_json
from recmill.launch.watchdog import Hang, Heartbeat, read_hangs


@pytest.mark.parametrize(("library", "is_run_removed"), [("PyDLL", False), ("CDLL", False), ("CDLL", True)])
def test_a_process_that_hangs_reports_its_stacks_and_ends_even_if_it_never_releases_pythons_lock(
    library: str, is_run_removed: bool, tmp_path: Path
) -> None:
    """ctypes calls through PyDLL keep Python's lock, so its other threads cannot run."""
    run = tmp_path / "removed" if is_run_removed else tmp_path
    code = (
        "import ctypes, faulthandler, sys, threading\n"
        "from pathlib import Path\n"
        "from recmill.launch import watchdog\n"
        "watchdog._LINGER_SECONDS = 0\n"
        "armed, later = threading.Event(), faulthandler.dump_traceback_later\n"
        "faulthandler.dump_traceback_later = lambda *a, **b: (later(*a, **b), armed.set())\n"
        "run = Path(sys.argv[1])\n"
        "heartbeat = watchdog.Heartbeat()\n"
        "with watchdog.watching(heartbeat, watchdog.Watch(3, 1.0, Path(sys.argv[2]), run), print):\n"
        "    heartbeat.beat('testing', 5)\n"
        "    armed.wait()\n"
        f"    ctypes.{library}(None).sleep(100)\n"
    )
    command = [sys.executable, "-u", "-c", code, str(tmp_path), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 1
    if library == "PyDLL":
        assert "Timeout" in done.stderr
        assert not list(tmp_path.iterdir())
    else:
        assert done.stdout.startswith("rank 3 made no progress for 1")
        assert is_run_removed or "testing, after step 5" in (tmp_path / "hang-rank-3.txt").read_text()
        (hang,) = read_hangs(tmp_path)
        assert (hang.rank, hang.step, hang.phase) == (3, 5, "testing")


def test_a_beat_without_a_step_keeps_the_step_before() -> None:
    heartbeat = Heartbeat()
    heartbeat.beat("training", 7)
    heartbeat.beat("evaluating")
    assert heartbeat.last is not None
    assert (heartbeat.last.phase, heartbeat.last.step) == ("evaluating", 7)


def test_the_rank_furthest_behind_comes_first(tmp_path: Path) -> None:
    for rank, step in ((0, 8), (1, 7), (2, 8)):
        write_json(tmp_path / f"hang-{rank}.json", asdict(Hang(rank, step, "training", 3.0, [])))
    assert [hang.rank for hang in read_hangs(tmp_path)] == [1, 0, 2]


def test_a_rank_that_only_waits_comes_last_and_is_not_blamed(tmp_path: Path) -> None:
    for rank, is_waiting in ((0, True), (1, False)):
        hang = Hang(rank, 0, "starting", 3.0, [], is_waiting)
        write_json(tmp_path / f"hang-{rank}.json", asdict(hang))
    assert [str(hang) for hang in read_hangs(tmp_path)] == [
        "rank 1 made no progress for 3 s, starting, after step 0",
        "rank 0 waited for the other ranks for 3 s, starting, after step 0",
    ]
