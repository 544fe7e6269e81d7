"""Kills and full disks at every failpoint of saving, training and preparing leave only complete results."""

import signal
from pathlib import Path
from typing import Any

import pytest
import xxhash

from recmill import prepare, train
from recmill.commands.checkpoint import list_checkpoints
from recmill.data.opening import open_dataset
from recmill.errors import DataError
from recmill.failpoints import POINTS

from ..checkpoints import newest, tensors_of
from ..distributed.runs import loss_by_step
from ..group import exit_code

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def losses_and_digests(run: Path) -> tuple[dict[int, float], dict[str, str]]:
    digests = {key: xxhash.xxh3_64_hexdigest(value.numpy().tobytes()) for key, value in tensors_of(newest(run)).items()}
    return loss_by_step(run), digests


@pytest.fixture(scope="module")
def tiny(clicks: Path) -> dict[str, Any]:
    return {
        "data": {"path": str(clicks), "limit_val_batches": 2, "limit_test_batches": 2},
        "model": {"name": "dlrm", "embedding_dim": 4, "bottom_mlp": [4], "top_mlp": [4]},
        "train": {"device": "cpu", "global_batch_size": 125, "log_every_steps": 1, "kernels": "torch", "max_steps": 9},
        "eval": {"global_batch_size": 300, "every_steps": 4},
        "checkpoint": {
            "every_steps": 3,
            "full_every": 3,
            "at_start": True,
        },  # changes of a state without Adam's moments
    }


@pytest.fixture(scope="module")
def unbroken(tiny: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = tmp_path_factory.mktemp("unbroken") / "run"
    assert exit_code(train, tiny, str(run)) == 0
    return losses_and_digests(run)


CONDITIONS = {
    "train.begin": "",
    "train.loaded": "",
    "train.end": "",
    "train.step": "@step=5",
    "train.updated": "@step=5",
}


@pytest.mark.parametrize(
    "place",
    [
        place
        for place in POINTS
        if not place.startswith(("prepare.", "probe.", "store.", "ckpt.rows", "observe.", "predict."))
    ],
)
def test_a_kill_anywhere_loses_nothing_that_was_committed(
    place: str, tiny: dict[str, Any], unbroken: Any, tmp_path: Path
) -> None:
    """The second time it comes there, where it comes there twice; then the same command again, bit for bit."""
    run = tmp_path / "run"
    fail = f"{place}{CONDITIONS.get(place, '@hit=2')}:kill"
    assert exit_code(train, tiny, str(run), fail=fail) == -signal.SIGKILL
    checkpoints = list_checkpoints(run, digests=True) if any(run.glob("checkpoints/step-*")) else []
    assert [facts["health"] for facts in checkpoints] == ["complete"] * len(checkpoints)
    log = (run / "log.txt").read_text() if (run / "log.txt").is_file() else ""
    told = [int(line.split("step=")[1].split()[0]) for line in log.splitlines() if "checkpoint committed step=" in line]
    assert max(told, default=0) <= max((facts["step"] for facts in checkpoints), default=0)
    assert exit_code(train, tiny, str(run)) == 0
    assert losses_and_digests(run) == unbroken
    assert not [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-")]


def prepare_clicks(output: str, rows: int) -> None:
    prepare("synthetic-clicks", output, rows=rows, days=2, dense=2, tables=[5, 20], overwrite=True)


@pytest.mark.parametrize("action", ["kill", "nospace"])
@pytest.mark.parametrize(
    "place",  # synthetic data has no parts: test_own_clicks_resume.py has a log with them
    [place for place in POINTS if place.startswith("prepare.") and place != "prepare.part"],
)
def test_a_dataset_is_complete_or_absent(place: str, action: str, tmp_path: Path) -> None:
    output = tmp_path / "data"
    code = exit_code(prepare_clicks, str(output), 40, fail=f"{place}:{action}")
    assert code == (-signal.SIGKILL if action == "kill" else 1)
    if place == "prepare.renamed":
        assert open_dataset(output, "digests").description.recipe["rows"] == 40
    else:
        assert not output.exists()
        with pytest.raises(DataError):
            open_dataset(output)
    assert exit_code(prepare_clicks, str(output), 50) == 0  # over it, or over what it left
    assert open_dataset(output, "digests").description.recipe["rows"] == 50
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
