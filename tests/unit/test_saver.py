"""Saving in the background, and its failures. Sharded models are in tests/distributed/test_reshard.py."""

import errno
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

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
from ..group import in_group

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
    with pytest.raises(
        UserError, match=r"diverged: after step 2 layer bias holds values that are not finite numbers \(on rank 0\)"
    ):
        saver.handle_failure()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# ckpt.rows is reached by tables in files only: distributed/test_stores.py.
@pytest.mark.parametrize("place", [place for place in POINTS if place.startswith("ckpt.") and place != "ckpt.rows"])
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
        says_sizes = re.search(r"It needs 1,680 bytes, [\d,]+ were free. Earlier checkpoints", str(caught.value))
        assert bool(says_sizes) == (action == "nospace")
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
    with pytest.raises(RuntimeError) as caught:
        saver.handle_failure()
    assert str(caught.value) == "rank 0 could not save (RuntimeError: requested by RECMILL_FAIL at ckpt.written)"
    assert "Traceback" in caught.value.__notes__[0]  # for --debug


@pytest.mark.parametrize("function", ["saver.use_device", "format.commit"])
def test_no_exception_ends_a_save_silently(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(f"recmill.checkpoints.{function}", leave)
    saver = new_saver(tmp_path, nn.Linear(2, 2))
    saver.save(Position(step=1))
    with pytest.raises(RuntimeError, match=r"rank 0 could not save \(SystemExit"):
        saver.finish()


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "Earlier checkpoints are untouched. Choose a directory that you may write to"),
        (errno.EIO, "Earlier checkpoints are untouched. The disk reports an error: look at the system log"),
        (errno.EPROTO, "Earlier checkpoints are untouched. Fix that and run the same command again"),
        (errno.ENOENT, "The run directory was removed or renamed while it was in use"),
    ],
)
def test_an_error_of_the_disk_has_its_own_remedy(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "x"))

    monkeypatch.setattr(saver_module.on_disk, "commit", fail)
    saver = new_saver(tmp_path, nn.Linear(2, 2))
    saver.save(Position(step=1))
    with pytest.raises(ResourceError) as caught:
        saver.finish()
    fact = f"a checkpoint could not be written ({tmp_path / 'x'}: {os.strerror(number)}). {remedy}"
    assert fact in str(caught.value)
    assert "bytes" not in str(caught.value)


def save_with_a_limit(directory: Path) -> str:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    saver = new_saver(directory, nn.Linear(300, 300))
    saver.save(Position(step=1))
    try:
        saver.finish()
    except ResourceError as error:
        return str(error)
    return "saved"


def test_a_limit_of_file_sizes_is_reported_as_such(tmp_path: Path) -> None:
    message = in_group(1, save_with_a_limit, tmp_path)
    assert "a checkpoint could not be written (File too large). " in message
    assert "ulimit -f" in message


def test_older_checkpoints_that_cannot_be_removed_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = new_saver(tmp_path, nn.Linear(2, 2))
    for step in (1, 2):
        saver.save(Position(step=step))
    saver.finish()

    def denied(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(saver_module.on_disk.shutil, "rmtree", denied)
    saver.save(Position(step=3))
    saver.finish()
    assert saver.committed_step == 3
    assert "older checkpoints could not be removed, and take up space: [Errno 13] Permission denied" in caplog.text


def test_bytes_written_by_any_rank_count_as_progress_of_a_save_that_training_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "_POLL_SECONDS", 0.01)
    saver = new_saver(tmp_path, nn.Linear(2, 2), background=False)
    beats = []

    def write_slowly(save: Any) -> None:
        """Write one byte after each beat."""
        file = save.partial.with_name("partial")
        file.mkdir()
        saver._partial = file
        for number in range(1, 4):
            seen = saver.heartbeat.last
            (file / "__1_0.distcp").write_bytes(b"x" * number)
            deadline = time.monotonic() + 20
            while saver.heartbeat.last is seen and time.monotonic() < deadline:
                time.sleep(0.001)
            beats.append(saver.heartbeat.last is not seen)

    monkeypatch.setattr(saver, "_write", write_slowly)
    saver.save(Position(step=1))
    assert beats == [True, True, True]


def test_memory_for_a_full_copy_is_checked_after_incremental_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = new_saver(tmp_path, nn.Linear(20, 20))
    saver._buffers = [torch.empty(3)]  # of changes
    monkeypatch.setattr(saver_module, "available_memory_bytes", lambda: 1500)
    assert not saver._has_memory_for_copy({"w": torch.empty(400)})
    assert saver._has_memory_for_copy({"w": torch.empty(300)})
