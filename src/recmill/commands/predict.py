"""`recmill predict`: the click probability of new rows, by the model of a run. Changes nothing in the run directory."""

import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from recmill.commands import assemble
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Fallback, Which, flag, new_path
from recmill.config.options import checked_options
from recmill.config.sections import Section
from recmill.data.frames import is_frame
from recmill.data.recipes import kept_dataset
from recmill.errors import CheckpointError, ConfigError, DataError, ResourceError, did_you_mean
from recmill.files.atomic import new_file
from recmill.metrics.binary import BinaryMetrics, Values, corrected_logits, sigmoid
from recmill.observe.log import quiet_libraries
from recmill.observe.progress import Progress
from recmill.schema import Dataset

if TYPE_CHECKING:
    import polars as pl

    from recmill.datasets.own_clicks.encoding import Encoder
    from recmill.datasets.own_clicks.values import RawRows

log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 1 << 13
_SUFFIXES = (".parquet", ".csv")
_DRIFT = 3.0  # times the share of the training rows
_FEW = 0.01  # smaller shares are not worth a warning


class Options(Section):
    input: str = flag(..., "The rows, in any format that `prepare clicks` reads: a file, a directory or a pattern.")
    output: str = flag(..., "The file to write, .parquet or .csv: the columns of --keep, and the score.")
    keep: list[str] | None = flag(None, "Columns of --input to copy, separated by commas.")
    logit: bool = flag(False, "Write the logit, too, in column 'logit'.")
    checkpoint: Which = None
    fallback: Fallback = False


@checked_keywords
def predict(
    run: str | Path,
    input: str | Path,
    output: str | Path,
    *,
    keep: list[str] | None = None,
    logit: bool = False,
    checkpoint: Literal["newest", "best"] | None = None,
    fallback: bool = False,
) -> dict[str, Any]:
    """Score new rows: write one row to `output` for each row of `input`, in order, with the click probability.

    The rows are encoded by the recipe that the run keeps, as its training rows were. Returns {"rows": ..., "output":
    ..., "features": shares of missing, unseen and clipped values}, and with labels in `input` also "metrics".
    """
    if is_frame(input):
        raise ConfigError("`input` is a path, not a frame. For frames: recmill.open_run(run).predict(frame).")
    given: dict[str, Any] = {"input": str(input), "output": str(output), "keep": keep, "logit": logit}
    options = checked_options("predict", Options, {**given, "checkpoint": checkpoint, "fallback": fallback})
    predictor = Predictor(run, options.checkpoint, options.fallback)
    path = new_path(options.output, "--output")
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"--output {path.name}: end it with .parquet or .csv, which says the format to write.")
    return predictor.write(options, path)


class Predictor:
    """A run's click model on CPU, unsharded, with the recipe of its rows."""

    def __init__(self, run: str | Path, which: str | None = None, fallback: bool = False) -> None:
        assemble.check_which(which)
        self._run, self._config = assemble.open_trained_run(run)
        if assemble.model_module(self._config).KIND != "clicks":
            raise ConfigError(
                f"{self._run.path}: '{self._config.model_name}' is no click model. Use `recmill recommend`."
            )
        self._which, self._fallback = which, fallback

    @cached_property
    def _dataset(self) -> Dataset:
        return kept_dataset(self._run.path)

    @cached_property
    def encoder(self) -> "Encoder":
        from recmill.datasets.own_clicks.encoding import Encoder, load_recipe

        return Encoder(load_recipe(self._dataset.path), self._dataset.path)

    @cached_property
    def _network(self) -> Any:
        network, self._checkpoint = assemble.unsharded_network(
            self._run, self._config, self._dataset, self._which, self._fallback
        )
        return network

    @cached_property
    def _maker(self) -> Any:
        from recmill.data.click_batches import BatchMaker

        return BatchMaker(self._dataset.clicks, *assemble.click_rules(self._config, self._dataset))

    def logits(self, rows: "RawRows", with_labels: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return logits float32 [n], and the labels int32 [n]."""
        network = self._network  # imports torch in the fast way
        import torch

        encoded = self.encoder.encode(rows, with_labels, may_be_missing=True)
        found = [np.empty(0, np.float32)]
        with torch.no_grad(), quiet_libraries():
            for start in range(0, len(encoded), _ROWS_AT_ONCE):
                part = encoded[start : start + _ROWS_AT_ONCE]
                batch = self._maker.batch(part, len(part), np.ones(len(part), np.float32))
                found.append(network(*batch.inputs()).float().numpy())
        logits = corrected_logits(np.concatenate(found), self._dataset.clicks.negatives)
        if not np.isfinite(logits).all():
            raise CheckpointError(
                f"{self._checkpoint}: its model gives scores that are not finite numbers. Use another checkpoint, or "
                "train again with lower learning rates."
            )
        return logits, encoded.labels

    def score(self, frame: "pl.DataFrame") -> "pl.DataFrame":
        """Return columns score and logit for the rows of a frame."""
        import polars as pl

        from recmill.datasets.own_clicks.values import RawRows

        needed = self.encoder.recipe.log.feature_columns()
        if missing := [column for column in needed if column not in frame.columns]:
            raise DataError(
                f"the frame has no column '{missing[0]}', which the model needs. "
                f"{did_you_mean(missing[0], frame.columns)}It needs {', '.join(needed)}."
            )
        logits, _ = self.logits(RawRows(frame.select(needed), "the frame", range(1, frame.height + 1)))
        return pl.DataFrame({"score": sigmoid(logits).astype(np.float32), "logit": logits})

    def write(self, options: Options, output: Path) -> dict[str, Any]:
        """Score the rows of options.input to the new file `output`."""
        import polars as pl
        from polars.io.plugins import register_io_source

        from recmill.datasets.inputs.parquet import converted_type
        from recmill.datasets.inputs.reading import num_rows
        from recmill.datasets.own_clicks.encoding import Tally
        from recmill.datasets.own_clicks.reading import check_columns, columns_of, found_files, read, types_of

        schema = self.encoder.recipe.log
        files = found_files(options.input)
        kept = options.keep or []
        needed = list(dict.fromkeys([*schema.feature_columns(), *kept]))
        lack = "the model needs columns that are not there"
        check_columns(files, schema.input, schema.feature_columns(), lack, "Add them: its features are made of them.")
        check_columns(files, schema.input, kept, "--keep names columns that are not there", "Correct --keep.")
        if taken := {"score", "logit"} & set(kept):
            raise ConfigError(f"--keep {taken.pop()}: a column of the output has this name. Rename it in the input.")
        has_labels = all(schema.label.column in columns_of(file, schema.input) for file in files)
        columns = [*needed, *([schema.label.column] if has_labels and schema.label.column not in needed else [])]
        there = types_of(files[0], schema.input)
        types = {name: converted_type(str(files[0]), name, there[name]) for name in kept}
        types |= {"score": pl.Float32()} | ({"logit": pl.Float32()} if options.logit else {})
        if nested := [name for name, kind in types.items() if kind.is_nested() and output.suffix == ".csv"]:
            raise ConfigError(
                f"--keep {nested[0]}: its values are {types[nested[0]]}, which .csv cannot hold. Use .parquet."
            )
        metrics = BinaryMetrics()
        self.encoder.tally = Tally()
        total = sum(num_rows(file, schema.input) for file in files)

        def frames(*_: object) -> Iterator[pl.DataFrame]:
            with Progress("scoring", total, "rows") as progress:
                for rows in (rows for file in files for rows in read(file, schema.input, columns)):
                    logits, labels = self.logits(rows, has_labels)
                    is_labelled = labels >= 0
                    metrics.update(logits[is_labelled], labels[is_labelled])
                    yield self._scored(rows, logits, options).cast(types)  # type: ignore[arg-type]
                    progress.advance(len(rows))

        with new_file(output) as partial:
            source = register_io_source(frames, schema=types)
            try:
                (source.sink_csv if output.suffix == ".csv" else source.sink_parquet)(partial)
            except pl.exceptions.ComputeError as error:
                raise ResourceError(
                    f"{output}: could not be written ({error}). Is the disk full? Free some space and run it again."
                ) from error
        shares = self.shares()
        for found in shares:
            if found["here"] > max(_DRIFT * found["training"], _FEW):
                text = "%s: %.1f %% of the values are %s, compared with %.1f %% in training"
                log.warning(text, found["feature"], 100 * found["here"], found["kind"], 100 * found["training"])
        result: dict[str, Any] = {"rows": self.encoder.tally.rows, "output": str(output), "features": shares}
        return result | ({"metrics": _values(metrics)} if has_labels else {})

    def _scored(self, rows: "RawRows", logits: np.ndarray, options: Options) -> "pl.DataFrame":
        import polars as pl

        kept = {name: rows.frame[name] for name in options.keep or []}
        scores = {"score": sigmoid(logits).astype(np.float32)} | ({"logit": logits} if options.logit else {})
        return pl.DataFrame({**kept, **scores})

    def shares(self) -> list[dict[str, Any]]:
        """Return for each feature the shares of missing, unseen and clipped values, here and in the training rows."""
        found = []
        trained = self.encoder.recipe.tally
        for feature, counts in self.encoder.tally.counts.items():
            before = trained.get(feature, {})
            for kind, count in counts.items():
                here = count / max(self.encoder.tally.rows, 1)
                then = before.get(kind, 0) / max(self.encoder.recipe.training_rows, 1)
                found.append({"feature": feature, "kind": kind, "here": here, "training": then})
        return found


def _values(metrics: BinaryMetrics) -> Values:
    import torch

    from recmill.world import World

    return metrics.compute(World(0, 1, 0, 1, torch.device("cpu")))
