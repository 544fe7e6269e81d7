"""The examples of docs/extending.md work as they are written."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from recmill import prepare, registry, train
from recmill.data.opening import open_dataset
from recmill.world import joined_world

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, where Python finds them: also in the processes that training starts."""
    folder = tmp_path / "examples"
    folder.mkdir()
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    for name, text in blocks:
        (folder / name).write_text(text, encoding="utf-8")
    assert {name for name, _ in blocks} >= {"factorization_machine.py", "cycles.py", "accuracy.py"}
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_the_model_learns_in_this_process(examples: Path, clicks: Path, tmp_path: Path) -> None:
    registry.MODELS["factorization_machine"] = "factorization_machine"
    try:
        config = {
            "data": {"path": str(clicks)},
            "model": {"name": "factorization_machine", "embedding_dim": 8},
            "train": {"device": "cpu", "global_batch_size": 100, "num_epochs": 8, "log_every_steps": 16},
            "optim": {"dense": {"lr": 0.02}},
        }
        with pytest.MonkeyPatch.context() as launched:
            launched.setenv("RANK", "0")
            launched.setenv("WORLD_SIZE", "1")
            train(config, tmp_path / "run")
    finally:
        del registry.MODELS["factorization_machine"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert losses[-1] < 0.9 * losses[0]


def test_the_dataset_is_prepared_and_valid(examples: Path, tmp_path: Path) -> None:
    registry.DATASETS["cycles"] = "cycles"
    try:
        description = prepare("cycles", tmp_path / "d", users=7, items=5)
    finally:
        del registry.DATASETS["cycles"]
    assert (description["num_users"], description["num_items"], description["num_interactions"]) == (7, 5, 56)
    items = open_dataset(tmp_path / "d", verify="digests").array("items.npy").reshape(7, 8)
    assert items[1].tolist() == [2, 3, 4, 5, 1, 2, 3, 4]


def test_the_metric_is_right(examples: Path) -> None:
    from accuracy import accuracy  # type: ignore[import-not-found]

    with joined_world("cpu") as world:
        found = accuracy(np.array([2.0, -1.0, 0.5, -3.0]), np.array([True, True, False, False]), world)
    assert found == 0.5
