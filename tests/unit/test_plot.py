import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

import recmill
from recmill.commands.plot import Axis
from recmill.errors import ConfigError, ResourceError


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs with other metrics each, one still without a validation."""
    paths = []
    for name, metric in (("clicks", "auroc"), ("films", "full/ndcg@10"), ("new", "")):
        path = tmp_path / name
        path.mkdir()
        (path / "status.json").write_text('{"state": "running"}')
        lines = [{"step": step, "split": "train", "loss": 1 / step, "epochs_done": step / 4} for step in (1, 2, 3)]
        values = {metric: 0.5, "logloss": 0.25, "epochs_done": 0.5}
        validation = [{"step": 2, "split": "val", "headline": metric, **values}] if metric else []
        (path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, *validation]))
        paths.append(path)
    return paths


def test_curves_show_the_loss_and_the_headline_metrics_of_all_runs(runs: list[Path], tmp_path: Path) -> None:
    path = recmill.plot(*runs, output=tmp_path / "curves.svg")
    drawn = path.read_text()
    comments = re.findall(r"<!-- (.*?) -->", drawn)  # matplotlib repeats its texts there
    for text in ("training loss", "validation auroc", "validation full/ndcg@10", *map(str, runs)):
        assert text in comments
    assert "validation logloss" not in comments
    before = path.read_bytes()
    recmill.plot(runs, output=path)
    assert path.read_bytes() == before


def test_other_metrics_can_be_chosen_and_a_png_be_written(runs: list[Path], tmp_path: Path) -> None:
    path = recmill.plot(runs[0], metric=["logloss"], output=tmp_path / "a.png")
    assert recmill.plot(runs[0], metric="logloss", output=tmp_path / "a.svg").is_file(), "a single name"
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--metric: unknown metric 'loglos'\. Did you mean 'logloss'\?"):
        recmill.plot(runs[0], metric=["loglos"])
    with pytest.raises(ConfigError, match=r"a\.jpg: use a name that ends in \.svg or \.png"):
        recmill.plot(runs[0], output="a.jpg")


def test_without_matplotlib_the_error_names_the_extra(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ResourceError, match=r"pip install 'recmill\[plot\]'"):
        recmill.plot(runs[0])


def test_curves_can_be_drawn_by_epoch(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[Axis, list[list[float]]] = {"epoch": [], "step": []}

    draw = Axes.plot

    def noted(axes: Axes, x: Any, y: Any, **options: Any) -> None:
        drawn[name].append(list(x))
        draw(axes, x, y, **options)

    monkeypatch.setattr(Axes, "plot", noted)
    for name in drawn:
        recmill.plot(runs[0], x=name, output=tmp_path / f"{name}.svg")
        assert f"<!-- {name} -->" in (tmp_path / f"{name}.svg").read_text()
    assert drawn == {"epoch": [[0.25, 0.5, 0.75], [0.5]], "step": [[1, 2, 3], [2]]}
    (runs[0] / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 1}\n')
    with pytest.raises(ConfigError, match=r"--x epoch: .* has no epochs_done: .* Use --x step\."):
        recmill.plot(runs[0], x="epoch", output=tmp_path / "old.svg")
