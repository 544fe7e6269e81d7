import errno

import pytest

from recmill import failpoints
from recmill.errors import ConfigError


@pytest.fixture(autouse=True)
def fresh() -> None:
    failpoints.active_failures.cache_clear()


def test_nothing_happens_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(failpoints.VARIABLE, raising=False)
    for point in failpoints.POINTS:
        failpoints.reach(point)


def test_only_where_every_condition_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(
        failpoints.VARIABLE, "train.step@step=7@rank=1:raise, ckpt.sync@hit=2:eio,ckpt.shards@rank=0:raise"
    )
    failpoints.reach("train.step", step=6)
    failpoints.reach("ckpt.shards")
    failpoints.reach("ckpt.sync")
    with pytest.raises(RuntimeError, match=r"requested by RECMILL_FAIL at train\.step"):
        failpoints.reach("train.step", step=7)
    with pytest.raises(OSError, match="Input/output error") as caught:
        failpoints.reach("ckpt.sync")
    assert caught.value.errno == errno.EIO
    failpoints.reach("ckpt.sync")  # the third time


def test_slow_waits_each_time_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(failpoints.time, "sleep", waited.append)
    monkeypatch.setenv(failpoints.VARIABLE, "train.step:slow")
    for step in range(3):
        failpoints.reach("train.step", step)
    assert waited == [0.1] * 3


@pytest.mark.parametrize(
    "text", ["train.stop:kill", "train.step:explode", "train.step", "train.step@day=1:kill", "ckpt.sync@hit=²:eio"]
)
def test_a_word_that_means_nothing_is_an_error_with_those_that_do(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, text)
    with pytest.raises(ConfigError, match=r"RECMILL_FAIL: .* is not POINT.*ckpt.before_rename.*nospace"):
        failpoints.reach("train.step")
