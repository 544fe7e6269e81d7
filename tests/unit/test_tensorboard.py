"""Event files, read by TensorBoard's own code. Of a run that was killed: tests/distributed/test_observing.py."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recmill.observe.run_dir import RunDirectory
from recmill.observe.tensorboard import EventFile, scalars

LINES = [
    {"step": 1, "epoch": 0, "split": "train", "loss": 0.75, "time": 1e9, "lr": 2},
    {"step": 300, "epoch": 1, "split": "val", "headline": "auroc", "auroc": 0.5, "logloss": None, "time": 1e9 + 2.5},
    {"step": 2**40, "epoch": 9, "split": "train", "loss": 1e300, "time": 1e9 + 3},
]


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values by tag."""
    events = EventAccumulator(str(folder)).Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return {tag: values for tag, values in found.items() if values}  # TensorBoard still names those it has forgotten


def test_tensorboard_reads_every_number_with_its_step_and_time(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "tensorboard")
    file.begin(LINES[:1])
    for line in LINES[1:]:
        file.add(line)
    assert read(tmp_path / "tensorboard") == {
        "train/loss": [(1, 0.75), (2**40, float("inf"))],  # TensorBoard has 32-bit numbers
        "train/lr": [(1, 2.0)],
        "val/auroc": [(300, 0.5)],
    }
    (event,) = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("val/auroc")
    assert event.wall_time == 1e9 + 2.5
    assert scalars(LINES[1]) == {"val/auroc": 0.5}


def test_a_later_file_replaces_an_earlier_one_even_if_the_clock_was_set_back(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.begin(LINES)
    in_the_future = tmp_path / f"events.out.tfevents.{2**62}.host.recmill"  # by a clock that was set back since then
    next(tmp_path.iterdir()).rename(in_the_future)
    for _ in range(3):
        file.begin(LINES[:1])
        assert read(tmp_path) == {"train/loss": [(1, 0.75)], "train/lr": [(1, 2.0)]}
    others = tmp_path / "events.out.tfevents.1.host"  # of another program
    others.write_bytes(b"")
    file.begin(LINES[:1])
    assert others.exists()
    others.unlink()
    assert len(list(tmp_path.iterdir())) == 2
    file.begin(LINES[:2])
    assert read(tmp_path)["val/auroc"] == [(300, 0.5)]


def test_a_running_tensorboard_forgets_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    EventFile(tmp_path).begin(LINES)
    running = EventAccumulator(str(tmp_path)).Reload()
    file = EventFile(tmp_path)
    file.begin(LINES[:1])
    file.add(LINES[0] | {"step": 2, "loss": 0.5})
    running.Reload()
    assert [(event.step, event.value) for event in running.Scalars("train/loss")] == [(1, 0.75), (2, 0.5)]


def test_an_incomplete_last_event_is_left_out(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.begin(LINES)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert read(tmp_path)["train/loss"] == [(1, 0.75)]


def test_metrics_that_a_run_forgets_are_forgotten_in_tensorboard(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_metrics({"step": 1, "split": "train", "loss": 0.5})
    run.copy_metrics_to_tensorboard()
    run.append_metrics({"step": 2, "split": "val", "auroc": 0.5})
    assert read(run.tensorboard) == {"train/loss": [(1, 0.5)], "val/auroc": [(2, 0.5)]}
    run.forget_metrics_of(2, "val")
    run.append_metrics({"step": 2, "split": "val", "auroc": 0.25})
    assert read(run.tensorboard) == {"train/loss": [(1, 0.5)], "val/auroc": [(2, 0.25)]}


def test_a_file_in_the_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    with pytest.raises(FileExistsError):
        RunDirectory(tmp_path).copy_metrics_to_tensorboard()
