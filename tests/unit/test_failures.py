"""Which of several reports explains why a job failed."""

from dataclasses import asdict
from pathlib import Path

import pytest

from recmill.errors import DataError, Interrupted, Preempted, ResourceError
from recmill.files.atomic import write_json
from recmill.launch.failures import Failure, LostWorkerError, first_error
from recmill.launch.watchdog import Hang


def report(job: Path, rank: int, at: float, kind: str = "", message: str = "message") -> None:
    write_json(job / f"error-{rank}.json", asdict(Failure(rank, at, kind, message, "traceback")))


def hang(job: Path, rank: int, step: int = 7) -> None:
    frames = ["/a.py:1 outer: x", "/b.py:2 fit: step()", "/c.py:3 all_reduce: wait()"]
    write_json(job / f"hang-{rank}.json", asdict(Hang(rank, step, "training", 4.0, frames)))


def test_the_first_error_of_a_user_wins_over_earlier_crashes(tmp_path: Path) -> None:
    report(tmp_path, 0, at=1.0, message="RuntimeError: connection closed")
    report(tmp_path, 1, at=3.0, kind="DataError", message="later")
    report(tmp_path, 2, at=2.0, kind="DataError", message="file: row 3")
    error = first_error(tmp_path, [{0: 1, 1: 3, 2: 3}], 3, [])
    assert isinstance(error, DataError)
    assert (str(error), error.rank) == ("file: row 3", 2)


def test_every_rank_of_a_hanging_job_is_described_with_its_last_step_and_stack(tmp_path: Path) -> None:
    hang(tmp_path, 0, step=8)
    hang(tmp_path, 1, step=7)
    error = first_error(tmp_path, [], 3, [])
    assert isinstance(error, LostWorkerError)
    text = str(error)
    assert "rank 2 does not answer" in text
    assert text.index("rank 1 made no progress for 4 s, training, after step 7") < text.index("rank 0 made no progress")
    assert "/c.py:3 all_reduce: wait()" in text
    assert "hang-rank-*.txt" in text


def test_ranks_that_another_machine_started_are_named_if_they_do_not_answer(tmp_path: Path) -> None:
    for rank, silent in ((2, [0]), (3, [0, 2])):  # 3 asked before 2 had answered
        write_json(tmp_path / f"hang-{rank}.json", asdict(Hang(rank, 7, "training", 4.0, [], True, silent)))
    text = str(first_error(tmp_path, [], 2, [], first_rank=2))
    assert "rank 0 does not answer: its machine cannot be reached" in text
    assert "rank 2 does not answer" not in text


def test_no_rank_of_a_hanging_job_on_gpus_is_blamed(tmp_path: Path) -> None:
    """A wait for NCCL shows where a value is needed on the CPU, on any rank and at any step: here rank 2 is stuck."""
    waits = {
        0: "/meter.py:40 values: float(self._loss_sum)",
        1: "/interaction.py:9 update: logits.cpu()",
        2: "/clicks.py:77 read: file.read()",
        3: "/guards.py:50 _digest: int(ids.max())",
    }
    for rank, frame in waits.items():
        step = 8 if rank else 9  # the CPU of rank 0 was a step ahead of its GPU
        write_json(
            tmp_path / f"hang-{rank}.json", asdict(Hang(rank, step, "training", 4.0, ["/fit.py:1 fit: x", frame]))
        )
    error = first_error(tmp_path, [], 4, [])
    assert isinstance(error, LostWorkerError)
    assert error.rank is None
    for rank, frame in waits.items():
        assert f"rank {rank} made no progress for 4 s, training, after step {8 if rank else 9}" in str(error)
        assert frame in str(error)


def test_only_some_ranks_of_a_large_hanging_job_are_listed(tmp_path: Path) -> None:
    for rank in range(9):
        hang(tmp_path, rank)
    assert "and 5 more" in str(first_error(tmp_path, [], 9, []))


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (9, LostWorkerError, "killed by SIGKILL. The system may have run out of memory: use fewer processes"),
        (11, LostWorkerError, "SIGSEGV. Native code accessed memory that is not its own. Try train.kernels=torch"),
        (7, LostWorkerError, "SIGBUS. A mapped file was truncated or cannot be read, or /dev/shm is full. Check"),
        (6, LostWorkerError, "SIGABRT. A library gave up"),
        (4, ResourceError, "ONEDNN_MAX_CPU_ISA=AVX2"),
    ],
)
def test_a_killed_worker_says_what_the_signal_means(number: int, kind: type, text: str, tmp_path: Path) -> None:
    report(tmp_path, 0, at=1.0, message="RuntimeError: connection closed")  # a consequence
    error = first_error(tmp_path, [{0: 1, 1: -number}], 2, [])
    assert type(error) is kind
    assert text in str(error)
    assert str(error).endswith("Then run the same command to resume.") == (number != 4)


def test_signals_that_the_launcher_received_explain_the_end(tmp_path: Path) -> None:
    assert isinstance(first_error(tmp_path, [{0: -15}], 1, ["SIGTERM"]), Preempted)
    twice = first_error(tmp_path, [{0: 1}], 1, ["SIGINT", "SIGTERM"])
    assert isinstance(twice, Interrupted)
    assert "Ended at once by a second signal, SIGTERM." in str(twice)


def test_a_worker_that_left_no_report_is_shown_with_its_output(tmp_path: Path) -> None:
    (tmp_path / "out-1.txt").write_text("Fatal Python error", encoding="utf-8")
    error = first_error(tmp_path, [{1: 3}], 2, [])
    assert isinstance(error, LostWorkerError)
    assert error.exit_code == 5
    assert str(error).startswith("Process 1 of the job exited with code 3 and no error report. A library does that")
    assert "ulimit -a" in str(error)
    assert error.__notes__ == ["Fatal Python error"]


def test_the_workers_that_were_killed_first_are_named_and_those_killed_at_the_same_time_together(
    tmp_path: Path,
) -> None:
    error = first_error(tmp_path, [{2: -9}, {0: -9, 1: -11}], 4, [])
    assert isinstance(error, LostWorkerError)
    assert (str(error).partition(".")[0], error.rank) == ("Process 2 of the job was killed by SIGKILL", 2)
    error = first_error(tmp_path, [{1: -9, 3: -9}, {0: -11}], 4, [])
    assert isinstance(error, LostWorkerError)
    assert (str(error).partition(".")[0], error.rank) == ("Processes 1, 3 of the job were killed by SIGKILL", None)


def test_a_lost_connection_explains_a_failure_only_if_nothing_else_does(tmp_path: Path) -> None:
    report(tmp_path, 0, at=1.0, kind="LostPeerError", message="Rank 1 did not join.")
    error = first_error(tmp_path, [{0: 5}], 2, [])
    assert isinstance(error, LostWorkerError)
    assert (str(error), error.rank) == ("Rank 1 did not join.", None)  # not the rank that waited
    (tmp_path / "out-1.txt").write_text("", encoding="utf-8")
    assert "Process 1 of the job exited with code 3" in str(first_error(tmp_path, [{0: 5}, {1: 3}], 2, []))
    report(tmp_path, 1, at=2.0, message="TypeError: x")
    assert "Process 1 of the job failed: TypeError" in str(first_error(tmp_path, [{0: 5, 1: 1}], 2, []))
