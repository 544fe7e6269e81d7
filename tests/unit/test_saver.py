"""Saving in the background, and its failures. Sharded models are in tests/distributed/test_reshard.py."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from recmill import failpoints
from recmill.checkpoints import loading
from recmill.checkpoints import saver as saver_module
from recmill.checkpoints.format import Position
from recmill.errors import ResourceError, UserError
from recmill.failpoints import POINTS, VARIABLE

from ..checkpoints import new_saver, newest_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # alone, as meant


def test_the_state_at_the_call_is_saved_not_that_during_writing(tmp_path: Path) -> None:
    """Training continues at once, on the same tensors."""
    network, other = nn.Linear(300, 200), nn.Linear(300, 200)
    saver = new_saver(tmp_path, network)
    for step in (1, 2):  # the second copy reuses the memory of the first
        expected = network.weight.detach().clone()
        saver.save(Position(step=step))
        with torch.no_grad():
            network.weight += 1
        saver.finish()
        loading.load(newest_in(tmp_path), other)
        assert torch.equal(other.weight, expected)


def test_without_memory_for_a_copy_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "available_memory_bytes", lambda: 10)
    saver = new_saver(tmp_path, nn.Linear(2, 2))
    saver.save(Position(step=3))
    assert newest_in(tmp_path).position.step == 3  # nobody waited for it


def test_a_value_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    network = nn.Linear(2, 2)
    saver = new_saver(tmp_path, network, on_error="continue")  # which is about disks
    saver.save(Position(step=1))
    with torch.no_grad():
        network.bias[1] = torch.nan
    saver.save(Position(step=2))
    with pytest.raises(UserError, match=r"After step 2 bias holds values that are not finite numbers \(on rank 0\)"):
        saver.handle_failure()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("place", [place for place in POINTS if place.startswith("ckpt.")])
@pytest.mark.parametrize("action", ["raise", "nospace", "eio"])
def test_an_error_at_any_failpoint_is_reported_and_the_earlier_checkpoint_stays(
    tmp_path: Path, place: str, action: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = nn.Linear(20, 20)
    saver = new_saver(tmp_path, network, on_error="continue")
    saver.save(Position(step=1))
    saver.finish()
    monkeypatch.setenv(VARIABLE, f"{place}:{action}")
    failpoints.active_failures.cache_clear()
    facts = {"raise": "requested by RECMILL_FAIL", "nospace": "No space left on device", "eio": "Input/output error"}
    with pytest.raises((UserError, RuntimeError, OSError), match=facts[action]) as caught:
        saver.save(Position(step=2))
        saver.finish()
    is_renamed = place in ("ckpt.committed", "ckpt.pruned")
    assert newest_in(tmp_path).position.step == (2 if is_renamed else 1)
    assert not list(tmp_path.glob(".saving-*"))
    assert "committed step=2" not in caplog.text
    if action != "raise" and place not in ("ckpt.begin", "ckpt.copied"):
        assert isinstance(caught.value, ResourceError)
        assert re.search(r"It needs 1,680 bytes, [\d,]+ are free. Earlier checkpoints", str(caught.value))
        saver.handle_failure()
        assert "Training continues" in caplog.text
    monkeypatch.delenv(VARIABLE)
    failpoints.active_failures.cache_clear()
    monkeypatch.setattr(saver, "_error", None)
    saver.save(Position(step=3))
    saver.finish()
    assert newest_in(tmp_path).position.step == 3


def test_the_last_checkpoint_must_be_saved_whatever_on_error_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "ckpt.written:nospace")
    failpoints.active_failures.cache_clear()
    saver = new_saver(tmp_path, nn.Linear(2, 2), on_error="continue", background=False)
    saver.save(Position(step=1))
    with pytest.raises(ResourceError, match="No space left on device"):
        saver.finish()


def test_a_defect_is_not_reported_as_a_user_s_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "ckpt.written:raise")
    failpoints.active_failures.cache_clear()
    saver = new_saver(tmp_path, nn.Linear(2, 2), on_error="continue")
    saver.save(Position(step=1))
    with pytest.raises(RuntimeError, match=r"rank 0 could not save:\n(?s:.)*requested by RECMILL_FAIL"):
        saver.handle_failure()


def test_a_missing_directory_is_a_resource_error(tmp_path: Path) -> None:
    saver = new_saver(tmp_path / "gone" / "checkpoints", nn.Linear(2, 2))
    saver.save(Position(step=1))
    with pytest.raises(ResourceError, match=r"\(No such file or directory\). It needs 24 bytes, an unknown number"):
        saver.finish()


def test_memory_for_a_full_copy_is_checked_after_incremental_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = new_saver(tmp_path, nn.Linear(20, 20))
    saver._buffers = [torch.empty(3)]  # of changes
    monkeypatch.setattr(saver_module, "available_memory_bytes", lambda: 1500)
    assert not saver._has_memory_for_copy({"w": torch.empty(400)})
    assert saver._has_memory_for_copy({"w": torch.empty(300)})
