"""`recmill predict`: scores of new rows or histories, by the model of a run. Changes nothing in the run directory."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack

import numpy as np

from recmill.commands import assemble
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Fallback, Overwrite, Procs, Which, flag
from recmill.config.options import checked_options
from recmill.data.frames import is_frame
from recmill.data.opening import open_dataset
from recmill.data.recipes import Tally, has_recipe, kept_dataset
from recmill.datasets.inputs.flags import NewRows, NewRowsFlags
from recmill.errors import CheckpointError, ConfigError, DataError
from recmill.metrics.binary import corrected_logits, sigmoid
from recmill.observe.log import quiet_libraries
from recmill.schema import Dataset

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

    from recmill.data.click_rows import ClickRows
    from recmill.datasets.inputs.section import InputSection
    from recmill.datasets.own_clicks.values import RawRows
    from recmill.observe.run_dir import RunDirectory
    from recmill.world import World

log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1 << 13
MISSING_INSTEAD = "To take such values as missing: --on-bad-value missing."


class Options(NewRowsFlags):
    input: str = flag(..., "The rows, in any format that `prepare clicks` reads: file, directory or pattern. -: stdin.")
    output: str = flag(..., "File to write: .parquet, .csv or .jsonl, by its name. -: stdout.")
    format: Literal["csv", "jsonl"] | None = flag(None, "The format of stdin and stdout.  [default: csv]")
    keep: list[str] | None = flag(None, "Columns of --input to copy, separated by commas.")
    logit: bool = flag(False, "Write the logit, too, in column 'logit'.")
    data: str | None = flag(None, "The dataset of a run on Criteo's logs, if it has moved.", metavar="DIRECTORY")
    overwrite: Overwrite = False
    procs: Procs = 1
    checkpoint: Which = None
    fallback: Fallback = False


@checked_keywords
def predict(
    run: str | Path,
    input: str | Path,
    output: str | Path,
    *,
    format: Literal["csv", "jsonl"] | None = None,
    keep: list[str] | None = None,
    logit: bool = False,
    data: str | Path | None = None,
    overwrite: bool = False,
    procs: int = 1,
    checkpoint: Literal["newest", "best"] | None = None,
    fallback: bool = False,
    **new_rows: Unpack[NewRows],
) -> dict[str, Any]:
    """Score new rows: write one row to `output` for each row of `input`, in order, with the click probability.

    The rows are encoded as the training rows were: by the recipe that the run keeps, or for Criteo's logs by that of
    the dataset. Returns {"rows": ..., "written": rows of the output, "output": ..., "features": shares of missing,
    unseen and clipped values, "bad_values": by feature, how many were taken as missing}, and "metrics" if `input` has
    labels. The output is the same for any number of processes. A call that was interrupted, repeated, resumes.

    With a sequence model, `input` has columns "history" (items, oldest first) and "candidates": a list, or a text with
    commas between original ids or titles. There is one row of output per candidate, in order, with columns "item" and
    "score".

    `columns`, `separator`, `quotes`, `escape`, `encoding`, `skip_lines`, `decimal`, `thousands`, `time_format`: how
    new rows differ from the training log. `on_bad_value`: a number or time that cannot be used is an error, or
    "missing".
    """
    from recmill.commands.scored_files import score_files

    if is_frame(input):
        raise ConfigError("`input` is a path, not a frame. For frames: recmill.open_run(run).predict(frame).")
    given: dict[str, Any] = {"input": input, "output": output, "format": format, "keep": keep, "logit": logit}
    given |= {"data": data, "overwrite": overwrite, "procs": procs, "checkpoint": checkpoint, "fallback": fallback}
    options = checked_options("predict", Options, {**given, **new_rows})
    return score_files(*scorer_of(run, options), options)


def work(world: "World", run: str, options: dict[str, Any], job: dict[str, Any], directory: str) -> int:
    """Score every N-th part in one of the launcher's N processes. Return the number of parts."""
    from recmill.commands.scored_files import Job, score_parts
    from recmill.datasets.writing import Work

    checked = Options(**options)
    scorer, _ = scorer_of(run, checked)
    return score_parts(scorer, Job.from_json(job), Work(Path(directory)), world.rank, world.size)


class RowEncoder(Protocol):
    """Turns raw rows into what a network reads, as preparation did, and counts what it met."""

    tally: Tally
    trained_tally: dict[str, dict[str, int]]
    trained_rows: int
    label_column: str
    feature_columns: list[str]

    def input_section(self, count_fields: Callable[[], int]) -> "InputSection": ...
    def adapt(self, new_rows: NewRowsFlags) -> None: ...
    def encode(self, rows: "RawRows", with_labels: bool = True, may_be_missing: bool = False) -> "ClickRows": ...


class Scorer:
    """What `scored_files` does with the rows of files."""

    rows_per_row = 1  # of the output, for a row of the input
    reads_labels = False  # of files that have them
    run: "RunDirectory"
    network: Any

    @cached_property
    def encoder(self) -> RowEncoder:
        raise NotImplementedError

    def new_encoder(self, new_rows: NewRowsFlags) -> RowEncoder:
        """Return an encoder of such rows with a tally of its own, for one of several threads."""
        encoder = copy.copy(self.encoder)
        encoder.tally = Tally()
        encoder.adapt(new_rows)
        return encoder

    def shares(self, tally: Tally) -> list[dict[str, Any]]:
        """Return for each feature the shares of missing, unseen and clipped values, and log warnings about them."""
        from recmill.commands.scored_files import shares

        return shares(tally, self.encoder)

    def scored(self, kept: "pl.DataFrame", encoded: "ClickRows") -> "pl.DataFrame":
        """Return the columns to keep with the columns of the output."""
        raise NotImplementedError

    @property
    def made(self) -> list[str]:
        """The columns of `scored` behind those to keep."""
        raise NotImplementedError

    def of_frame(self, frame: "pl.DataFrame", keep: Sequence[str], new_rows: NewRowsFlags) -> "pl.DataFrame":
        """Return `scored` for the rows of a frame."""
        encoded = self.encoded(frame, keep, new_rows)
        with self.one_thread():
            return self.scored(frame.select(keep), encoded)

    def encoded(self, frame: "pl.DataFrame", keep: Sequence[str], new_rows: NewRowsFlags) -> Any:
        """Return the rows of a frame, of which the columns to keep are there. Log the warnings of `score_files`."""
        from recmill.datasets.inputs.reading import lacking
        from recmill.datasets.own_clicks.values import RawRows

        encoder = self.new_encoder(new_rows)
        needed = encoder.feature_columns
        for columns, who in ((needed, f"the model needs {', '.join(needed)}"), (keep, "--keep")):
            if missing := [column for column in columns if column not in frame.columns]:
                raise DataError(f"{who}: the frame has {lacking(missing, frame.columns)}")
        self.check_kept(keep)
        numbers = range(1, frame.height + 1)
        rows = RawRows(frame.select(needed), "the frame", numbers, otherwise=MISSING_INSTEAD, prefix="")
        encoded = encoder.encode(rows, with_labels=False)
        self.shares(encoder.tally)
        return encoded

    def check_kept(self, keep: Sequence[str]) -> None:
        if twice := next((name for name in keep if keep.count(name) > 1), None):
            raise ConfigError(f"--keep {','.join(keep)}: '{twice}' occurs twice. Name it once.")
        if taken := {"score", "logit", *self.made} & set(keep):
            raise ConfigError(f"--keep {taken.pop()}: a column of the output has this name. Rename it in the input.")

    @contextmanager
    def one_thread(self) -> Iterator[None]:
        """Let torch use one thread for each batch, so that sums are always added in the same order."""
        assert self.network
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def scorer_of(run: str | Path, options: Options) -> tuple[Scorer, list[str]]:
    """Return what scores rows with the model of a run, and the columns that it makes."""
    _, config = assemble.open_trained_run(run)
    if assemble.model_module(config).KIND == "clicks":
        made = ["score", "logit"] if options.logit else ["score"]
        return Predictor(run, options.checkpoint, options.fallback, options.data), made
    from recmill.commands.ranker import Ranker
    from recmill.commands.recommend import Recommender

    if of_clicks := [name for name in ("logit", "data", "on_bad_value") if name in options.changed_keys()]:
        flag = f"--{of_clicks[0].replace('_', '-')}"
        raise ConfigError(f"{run}: its model is a sequence model, and {flag} is for click models. Remove it.")
    ranker = Ranker(Recommender(run, options.checkpoint, options.fallback))
    return ranker, ranker.made


class Predictor(Scorer):
    """A run's click model on CPU, unsharded, with the recipe of its rows."""

    reads_labels = True

    def __init__(
        self,
        run: str | Path,
        which: str | None = None,
        fallback: bool = False,
        data: str | None = None,
        dataset: Dataset | None = None,
    ) -> None:
        """`data`: where the dataset of Criteo's logs is; `dataset`: an open one, if no raw rows are scored."""
        assemble.check_which(which)
        self.run, self._config = assemble.open_trained_run(run)
        if assemble.model_module(self._config).KIND != "clicks":
            raise ConfigError(
                f"{self.run.path}: '{self._config.model_name}' is no click model. Use `recmill recommend`."
            )
        self._which, self._fallback, self._data = which, fallback, data
        self._open_dataset = dataset

    @property
    def made(self) -> list[str]:
        return ["score", "logit"]

    @cached_property
    def _dataset(self) -> Dataset:
        if self._open_dataset:
            return self._open_dataset
        path = Path(self._data or self._config.settings.data.path)
        if not has_recipe(self.run.path) and (self._data or path.is_dir()):
            dataset = open_dataset(path)
            if dataset.description.name == "criteo":
                return dataset
        return kept_dataset(self.run.path)

    @cached_property
    def encoder(self) -> RowEncoder:
        if self._dataset.description.name == "criteo":
            from recmill.datasets.criteo.encoding import CriteoEncoder

            return CriteoEncoder(self._dataset)
        from recmill.datasets.own_clicks.encoding import Encoder, load_recipe

        path = self._dataset.path
        return Encoder(load_recipe(path), path)

    @cached_property
    def network(self) -> Any:
        network, self._checkpoint = assemble.unsharded_network(
            self.run, self._config, self._dataset, self._which, self._fallback
        )
        return network

    @cached_property
    def maker(self) -> Any:
        from recmill.data.click_batches import BatchMaker

        return BatchMaker(self._dataset.clicks, *assemble.click_rules(self._config, self._dataset))

    def load(self) -> None:
        """Load now what the first call of `of_frame` would load, if new rows can be encoded at all."""
        if has_recipe(self.run.path):
            assert self.encoder and self.network and self.maker

    def logits(self, encoded: "ClickRows") -> np.ndarray:
        """Return logits float32 [n]. Within `one_thread` they do not depend on the machine's number of cores."""
        logits = self._outputs(encoded, self.network)
        if assemble.model_module(self._config).TASK == "retrieval":  # scores of pairs are no log odds
            return logits
        return corrected_logits(logits, self._dataset.clicks.negatives)

    def _outputs(self, encoded: "ClickRows", compute: "Callable[..., Tensor]") -> np.ndarray:
        """Return what `compute` makes of the network's inputs, float32 [n, ...]."""
        assert self.network  # imports torch in the fast way
        import torch

        found = []
        with torch.no_grad(), quiet_libraries():
            for start in range(0, len(encoded), _ROWS_AT_ONCE):
                part = encoded[start : start + _ROWS_AT_ONCE]
                batch = self.maker.batch(part, len(part), np.ones(len(part), np.float32))
                found.append(compute(*batch.inputs()).float().numpy())
        return self._finite(np.concatenate(found) if found else np.empty(0, np.float32))

    def _finite(self, outputs: np.ndarray) -> np.ndarray:
        if not np.isfinite(outputs).all():
            raise CheckpointError(
                f"{self._checkpoint}: its model gives scores that are not finite numbers. Use another checkpoint, or "
                "train again with lower learning rates."
            )
        return outputs

    def scored(self, kept: "pl.DataFrame", encoded: "ClickRows") -> "pl.DataFrame":
        import polars as pl

        logits = self.logits(encoded)
        return pl.DataFrame(kept.to_dict() | {"score": sigmoid(logits).astype(np.float32), "logit": logits})
