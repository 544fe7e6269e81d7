"""`recmill plot`: the learning curves of runs, as an SVG or PNG file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from recmill import registry
from recmill.commands.history import history
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Runs, flag, imported, listed
from recmill.commands.results import run_report
from recmill.config.options import given_path
from recmill.config.sections import Section
from recmill.errors import ConfigError
from recmill.files.atomic import new_file
from recmill.observe.tensorboard import LINE_FACTS

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOT_METRICS = (*LINE_FACTS, "loss", "samples_per_s", "lr", "lr_tables")
Axis = Literal["step", "epoch"]
_PANEL_INCHES = (5.0, 3.6)


class Options(Section):
    metric: list[str] = flag([], "A validation metric to show; may be repeated.  [default: the headline metrics]")
    x: Axis = flag("step", "The horizontal axis: steps or epochs.", "--x")
    output: str = flag("curves.svg", "SVG or PNG file to write; an existing one is replaced.", metavar="FILE")


@checked_keywords
def plot(*runs: Runs, metric: str | Sequence[str] = (), x: Axis = "step", output: str | Path = "curves.svg") -> Path:
    """Draw the training loss and validation metrics of `runs` (paths, or lists of them) by step or epoch.

    Returns the path of the file.
    """
    named_runs = listed(runs)
    if not named_runs:
        raise ConfigError("Nothing to plot: name at least one run.")
    path = given_path(output, "--output")
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--output {path}: use a name that ends in .svg or .png.")
    histories = {str(run): history(run) for run in named_runs}
    column = "epochs_done" if x == "epoch" else "step"
    for name, frame in histories.items():
        if column not in frame.columns:
            raise ConfigError(f"--x {x}: {name} has no {column}: an earlier version trained it. Use --x step.")
    validations = {name: frame.filter(frame["split"] == "val") for name, frame in histories.items()}
    filled = (name for frame in validations.values() for name in frame.columns if frame[name].count())
    known = dict.fromkeys(name for name in filled if name not in _NOT_METRICS)
    named = [metric] if isinstance(metric, str) else metric
    for name in named:
        if name not in known:
            raise ConfigError(f"--metric: {registry.unknown('metric', name, known)}")
    shown = named or [name for name in dict.fromkeys(run_report(run).metric for run in named_runs) if name]
    figure = new_figure(1 + len(shown))
    _draw(figure.axes[0], "training loss", histories, column, "loss")
    for axes, name in zip(figure.axes[1:], shown, strict=True):
        _draw(axes, f"validation {name}", validations, column, name)
    save_figure(figure, path)
    return path


def save_figure(figure: "Figure", path: Path) -> None:
    with new_file(path.absolute()) as partial:
        # Without a date and with fixed ids, the same runs give the same bytes.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(partial, format=path.suffix[1:], metadata=metadata)


def new_figure(panels: int) -> "Figure":
    """Return a figure with this many panels in a row."""
    matplotlib = imported("matplotlib", "Plots need matplotlib", "plot")
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "recmill"
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    figure.subplots(1, panels)
    return figure


def _draw(axes: "Axes", title: str, frames: "dict[str, pl.DataFrame]", x: str, y: str) -> None:
    for number, (run, frame) in enumerate(frames.items()):
        if y in frame.columns:  # the first matplotlib colours, the same for a run in each panel
            line = frame.drop_nulls(y)
            marker = "o" if line.height < 30 else ""
            axes.plot(line[x], line[y], label=run, color=f"C{number}", marker=marker, markersize=3)
    axes.set(title=title, xlabel="epoch" if x == "epochs_done" else x)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
