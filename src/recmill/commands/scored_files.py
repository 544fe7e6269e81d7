"""The files of `recmill predict`: rows are read in blocks, and scored in parts that survive a kill."""

import logging
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from recmill.checkpoints.format import committed
from recmill.commands.options import STREAM, new_table
from recmill.commands.predict import MISSING_INSTEAD
from recmill.data.recipes import NO_LABEL, Tally
from recmill.datasets.compressed import InputFile, file_state
from recmill.datasets.inputs.detection import changed
from recmill.datasets.inputs.files import found_files
from recmill.datasets.inputs.flags import NewRowsFlags
from recmill.datasets.inputs.parquet import converted_type
from recmill.datasets.inputs.reading import check_columns, columns_of, num_rows, types_of
from recmill.datasets.inputs.section import InputSection
from recmill.datasets.own_clicks.reading import read
from recmill.datasets.own_clicks.values import RawRows
from recmill.datasets.own_clicks.writing import read_arrow, write_arrow
from recmill.datasets.parallel import ordered
from recmill.datasets.writing import Work, resumable_work
from recmill.errors import ConfigError, DataError, ResourceError
from recmill.failpoints import reach
from recmill.hardware.cpu import threads_per_process
from recmill.launch.local import is_launched_with, run_job
from recmill.metrics.binary import BinaryMetrics, Values
from recmill.observe.progress import Progress

if TYPE_CHECKING:
    from recmill.commands.predict import Options, RowEncoder, Scorer

log = logging.getLogger(__name__)

_PART_ROWS = 1 << 16
_LABEL = "label of the row"  # a column of the parts that is not written
_PREFIX = "--"  # of the settings that errors name
_DRIFT = 3.0  # times the share of the training rows
_BAD = "bad"  # values that were taken as missing, in a `Tally`
_FEW = 0.01  # smaller shares are not worth a warning
_ADVICE = {
    "missing": "Check how this column is filled.",
    "unseen": "Check that they are written as in training. If they are new, prepare newer rows and train again.",
    "clipped": "Check their unit. If the log has changed, prepare newer rows and train again.",
}


@dataclass(frozen=True)
class Job:
    """What to read, which columns of it to write, and which columns are made of it."""

    files: list[str]
    section: InputSection
    columns: list[str]
    kept: list[str]
    has_labels: bool
    made: list[str]
    procs: int
    part_rows: int
    new_rows: NewRowsFlags

    def blocks(self) -> Iterator[tuple[int, RawRows]]:
        """Yield all rows in order, in numbered parts that are the same in every process."""
        number = 0
        for file in self.inputs():
            for rows in read(file, self.section, self.columns, _PREFIX):
                for start in range(0, len(rows), self.part_rows):
                    part = rows.frame.slice(start, self.part_rows)
                    yield number, RawRows(part, rows.file, rows.numbers[start : start + self.part_rows])
                    number += 1
        if not number:
            raise DataError(f"{self.files[0]}: no rows. Give a file that has some.")

    def inputs(self) -> list[InputFile]:
        return [file for name in self.files for file in found_files(name)]

    def kept_types(self) -> dict[str, Any]:
        there = types_of(self.inputs()[0], self.section, _PREFIX) if self.kept else {}
        return {name: converted_type(self.files[0], name, there[name]) for name in self.kept}

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "section": self.section.model_dump(), "new_rows": self.new_rows.model_dump()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Job":
        made = {"section": InputSection(**values["section"]), "new_rows": NewRowsFlags(**values["new_rows"])}
        return cls(**{**values, **made})


def score_files(scorer: "Scorer", made: list[str], options: "Options") -> dict[str, Any]:
    """Score the rows of options.input to options.output, and return what `recmill.predict` does.

    `made`: the columns of `scorer.scored` to write, behind those to keep.
    """
    if is_launched_with(options.procs):
        raise ConfigError("Rows are scored by processes of this command: use --procs N, without a launcher.")
    with ExitStack() as stack:
        spool = Path()
        if STREAM in (options.input, options.output):
            spool = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recmill-predict-")))
        elif options.format:
            raise ConfigError("--format is for stdin and stdout ('-'): names of files say their formats. Remove it.")
        suffix = f".{options.format or 'csv'}"
        if options.output == STREAM:
            output = spool / f"stdout{suffix}"
        else:
            output = new_table(options.output, "--output", options.overwrite)
        scorer.new_encoder(options)  # what is wrong with the run is reported before stdin is read
        given = options.input if options.input != STREAM else str(_spooled(spool / f"stdin{suffix}"))
        try:
            job = _checked_job(scorer, options, found_files(given), output, made)
            inputs = {str(file.absolute()): file_state(file) for file in job.inputs()}
            result = _score(scorer, options, job, inputs, output)
        except DataError as error:
            if options.input != STREAM:
                raise
            raise DataError(str(error).replace(given, "stdin")) from None
        if options.output == STREAM:
            with output.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return result | {"output": options.output}


def _spooled(path: Path) -> Path:
    """Copy stdin to a file, which can be read twice."""
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    if not path.stat().st_size:
        raise DataError("--input -: nothing came from stdin. Was the program before it successful?")
    return path


def _checked_job(scorer: "Scorer", options: "Options", files: list[InputFile], output: Path, made: list[str]) -> Job:
    encoder = scorer.encoder
    flags = options.given()

    def count_fields() -> int:
        with_tabs = InputSection(separator="\t", quotes=False)
        return len(columns_of(files[0], changed(with_tabs, flags | {"separator": "\t"}), _PREFIX))

    section = changed(encoder.input_section(count_fields), flags)
    kept = options.keep or []
    needed = list(dict.fromkeys([*encoder.feature_columns, *kept]))
    lack = "the model needs columns that are not there"
    remedy = "Rename or add what is missing: scores are computed from it."
    check_columns(files, section, encoder.feature_columns, lack, remedy, prefix=_PREFIX)
    copied = kept if output.suffix == ".parquet" else []
    check_columns(
        files, section, kept, "--keep does not fit the files", "Correct --keep, or the files.", copied, _PREFIX
    )
    scorer.check_kept(kept)
    label = encoder.label_column
    has_labels = scorer.reads_labels and all(label in columns_of(file, section, _PREFIX) for file in files)
    columns = [*needed, *([label] if has_labels and label not in needed else [])]
    new_rows = NewRowsFlags(**options.model_dump(include={*NewRowsFlags.model_fields}))
    part_rows = max(1, _PART_ROWS // scorer.rows_per_row)
    job = Job(list(map(str, files)), section, columns, kept, has_labels, made, options.procs, part_rows, new_rows)
    types = job.kept_types()
    if nested := [name for name, kind in types.items() if kind.is_nested() and output.suffix == ".csv"]:
        raise ConfigError(
            f"--keep {nested[0]}: its values are {types[nested[0]]}, which .csv cannot hold. Use .parquet or .jsonl."
        )
    return job


def _score(scorer: "Scorer", options: "Options", job: Job, inputs: dict[str, Any], output: Path) -> dict[str, Any]:
    run = scorer.run
    same = options.model_dump(exclude={"procs", "input", "output", "format", "overwrite"})
    recipe = same | {"run": str(run.path.absolute()), "checkpoints": [path.name for path in committed(run.checkpoints)]}
    remedy = "Wait for that command to end, or choose another --output."
    with resumable_work(output, recipe, inputs, "changed", remedy) as work:
        if options.procs == 1:
            parts = score_parts(scorer, job, work)
        else:
            arguments = {"device": "cpu", "run": str(run.path.absolute()), "options": options.model_dump()}
            arguments |= {"job": job.to_json(), "directory": str(work.directory)}
            parts = run_job("predict", arguments, options.procs)
        written = sum(work.part(f"score-{number}", dict)["written"] for number in range(parts))
        tally, metrics = _write(job, work, parts, output)
    result: dict[str, Any] = {"rows": tally.rows, "written": written, "output": str(output)}
    result["bad_values"] = {feature: bad for feature, counts in tally.counts.items() if (bad := counts.get(_BAD))}
    result["features"] = scorer.shares(tally)
    return result | ({"metrics": metrics} if job.has_labels else {})


def score_parts(scorer: "Scorer", job: Job, work: Work, rank: int = 0, size: int = 1) -> int:
    """Score those parts of the rows that are this rank's and not yet scored. Return the number of all parts."""
    count = 0

    def own_blocks() -> Iterator[tuple[int, RawRows]]:
        nonlocal count
        for number, rows in job.blocks():
            count = number + 1
            if number % size == rank:
                yield number, replace(rows, otherwise=MISSING_INSTEAD, prefix=_PREFIX)

    def score(block: tuple[int, RawRows]) -> int:
        number, rows = block
        work.part(f"score-{number}", partial(_score_part, scorer, job, rows, _part_file(work, number)))
        reach("predict.part")
        return len(rows)

    total = sum(num_rows(file, job.section) for file in job.inputs()) // size
    threads = threads_per_process(job.procs)
    with scorer.one_thread(), ThreadPoolExecutor(threads) as pool, Progress("scoring", total, "rows") as progress:
        for rows in ordered(pool, score, own_blocks(), ahead=0):
            progress.advance(rows)
    return count


def _part_file(work: Work, number: int) -> Path:
    return work.scratch / f"{number}.arrow"


def _score_part(scorer: "Scorer", job: Job, rows: RawRows, file: Path) -> dict[str, Any]:
    """Write the scores of some rows to a file, and return what was counted in them."""
    encoder = scorer.new_encoder(job.new_rows)
    encoded = encoder.encode(rows, job.has_labels, may_be_missing=True)
    scored = scorer.scored(rows.frame.select(job.kept), encoded)
    labels = [pl.Series(_LABEL, encoded.labels)] if job.has_labels else []
    write_arrow(file, scored.hstack(labels))
    counts = {name: dict(found) for name, found in encoder.tally.counts.items()}
    return {"rows": len(rows), "written": scored.height, "counts": counts}


def _write(job: Job, work: Work, parts: int, output: Path) -> tuple[Tally, Values]:
    """Write the scores of all parts to `output`. Return what was counted in them, and the metrics."""
    metrics, tally = BinaryMetrics(), Tally()
    files = [_part_file(work, number) for number in range(parts)]
    for number, file in enumerate(files):
        counted = work.part(f"score-{number}", dict)
        tally.rows += counted["rows"]
        for feature, found in counted["counts"].items():
            tally.counts.setdefault(feature, Counter()).update(found)
        if job.has_labels:
            labelled = read_arrow(file).filter(pl.col(_LABEL) != NO_LABEL)
            metrics.update(labelled["logit"].to_numpy(), labelled[_LABEL].to_numpy())
    written = work.data / "scores"
    try:
        _join(files, [*job.kept, *job.made], written, output.suffix)
    except pl.exceptions.ComputeError as error:
        raise ResourceError(
            f"{output}: could not be written ({error}). Is the disk full? Free some space and run it again."
        ) from error
    os.rename(written, output)
    shutil.rmtree(work.data)
    return tally, _values(metrics)


def _join(files: list[Path], columns: list[str], written: Path, suffix: str) -> None:
    """Write these columns of Arrow files to one file, in memory for one of them."""
    if suffix == ".parquet":
        pl.scan_ipc(files, glob=False).select(columns).sink_parquet(written)
        return
    with written.open("wb") as target:
        for number, file in enumerate(files):
            frame = read_arrow(file).select(columns)
            text = frame.write_csv(include_header=number == 0) if suffix == ".csv" else frame.write_ndjson()
            target.write(text.encode())  # on a full disk, Polars raises errors that do not say so


def _values(metrics: BinaryMetrics) -> Values:
    import torch

    from recmill.world import World

    return metrics.compute(World(0, 1, 0, 1, torch.device("cpu")))


def shares(tally: Tally, encoder: "RowEncoder") -> list[dict[str, Any]]:
    """Return for each feature the shares of missing, unseen and clipped values, here and in the training rows.

    Log a warning for each share that has become much larger.
    """
    found = []
    for feature, counts in tally.counts.items():
        before = encoder.trained_tally.get(feature, {})
        for kind, count in counts.items():
            if kind == _BAD:
                continue
            here = count / max(tally.rows, 1)
            then = before.get(kind, 0) / encoder.trained_rows if encoder.trained_rows else None
            found.append({"feature": feature, "kind": kind, "here": here, "training": then})
            if then is not None and here > max(_DRIFT * then, _FEW):
                text = "%s: %.1f %% of the values are %s, compared with %.1f %% in training. %s"
                log.warning(text, feature, 100 * here, kind, 100 * then, _ADVICE[kind])
    return found
