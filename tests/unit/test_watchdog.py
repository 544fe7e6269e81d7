import pytest

from recmill.watchdog import Hang, culprit

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
