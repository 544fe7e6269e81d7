"""A click log of your own: any columns, by a schema (see docs/own-data.md).

Vocabularies, quantiles and means are learned from the training rows alone. The recipe is stored with the dataset and
with every run that is trained on it, so that `recmill predict` encodes new rows in the same way.
"""

import logging
import mmap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

import numpy as np
import polars as pl
from pydantic import NonNegativeInt, field_validator

from recmill.config.sections import Section, key
from recmill.data.click_rows import ClickRows
from recmill.data.recipes import RECIPE_FILE, vocabulary_file
from recmill.datasets.compressed import InputFile, expansion, file_state, sample_digest
from recmill.datasets.inputs.delimited import NAMED_BAD_ROWS, SKIP, BadRows
from recmill.datasets.inputs.detection import described
from recmill.datasets.inputs.fields import Fields
from recmill.datasets.inputs.files import distinct_names, found_files
from recmill.datasets.inputs.frame import FrameFile
from recmill.datasets.inputs.reading import blocks as read_blocks
from recmill.datasets.inputs.reading import check_columns, columns_of, num_rows
from recmill.datasets.own_clicks.coding import Coder, can_be_numbered
from recmill.datasets.own_clicks.encoding import Encoder, Recipe
from recmill.datasets.own_clicks.guessing import as_toml, guess
from recmill.datasets.own_clicks.learning import Found, Learner, learned
from recmill.datasets.own_clicks.schema import FIRST_VALUE, ClicksSchema, checked_schema, load_schema
from recmill.datasets.own_clicks.skipping import good_blocks
from recmill.datasets.own_clicks.splitting import DROPPED_ROWS, NOT_SAMPLED, NUM_KINDS, Splits, check_split, split_rules
from recmill.datasets.own_clicks.values import RawRows, Values, counted_times, type_problems, weights
from recmill.datasets.own_clicks.writing import SplitWriter, read_arrow, replaced, write_arrow
from recmill.datasets.parallel import ordered
from recmill.datasets.writing import MADE_BY, Work, check_disk, seal, write_npy
from recmill.errors import ConfigError, DataError
from recmill.files.atomic import write_text
from recmill.hardware.cpu import num_cores
from recmill.observe.progress import Progress
from recmill.schema import SPLITS, ClicksDescription, Description, FileInfo, RowRange

if TYPE_CHECKING:
    from recmill.datasets.inputs.delimited import Each

__all__ = ["Options", "plan", "plan_frames", "write"]

FRAMES = ("input",)

log = logging.getLogger(__name__)

SCHEMA_FILE = "schema.toml"  # a schema that was guessed
_MAX_VALUES = 1 << 22  # of all columns together, before a new set of codes begins
_MAX_TEXTS = 16  # blocks of text that are divided at the same time, which take some 20 MB each
_RANGES = 1 << 16
Block = tuple[int, RawRows]  # the number of its first row in all files together, rows
KeptBlock = tuple[str, int, int, str, list[str]]  # file, first row in its file, rows, file of values, coded columns


class Kept(TypedDict):
    """What was kept of a file, and how many of its rows were skipped, with the first of them."""

    blocks: list[KeptBlock]
    skipped: int
    first: list[str]


class Options(Section):
    input: str = key(..., "A file, a directory, or a pattern in quotes like 'logs/*.csv.gz'; also s3://, gs://, hf://.")
    schema_file: str | None = key(
        None,
        "The schema: a TOML file. See docs/own-data.md.",
        alias="schema",  # pydantic has a method with this name
    )
    label: str | None = key(None, "Instead of --schema: guess the schema, as `recmill schema --label` does.")
    on_bad_row: Literal["fail", "skip"] = key(
        "fail", "Stop at a row that is cut short or has a bad number, time or label, or skip it."
    )
    max_bad_rows: NonNegativeInt = key(1000, "With --on-bad-row skip: stop after more than this many.")
    engine: Literal["polars", "spark"] = key(
        "polars", "polars: this machine. spark: a Spark cluster, which gives the same files."
    )
    spark_master: str | None = key(None, "Spark's address, like spark://host:7077 (default local[*]).")

    @field_validator("schema_file", mode="before")
    @classmethod
    def what_guess_schema_returns_has_a_schema(cls, given: Any) -> Any:
        return given.get("schema", given) if isinstance(given, dict) else given


@dataclass(frozen=True)
class Plan:
    log: ClicksSchema
    files: list[InputFile]
    guessed: str = ""  # the text of a schema that was guessed
    engine: Literal["polars", "spark"] = "polars"
    spark_master: str | None = None
    max_bad_rows: int | None = None  # to skip; None: one is an error

    @cached_property
    def recipe(self) -> dict[str, Any]:
        files = {
            name: f"{path.stat().st_size} bytes, sample {sample_digest(path)}"
            for name, path in zip(distinct_names(self.files), self.files, strict=True)
        }
        skipping = {} if self.max_bad_rows is None else {"on_bad_row": "skip", "max_bad_rows": self.max_bad_rows}
        return {"schema": self.log.model_dump(mode="json"), "files": files, **skipping}

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return {str(path.absolute()): file_state(path) for path in self.files}


def plan(options: Options) -> Plan:
    return _plan(options, lambda: found_files(options.input))


def plan_frames(options: Options, frames: Mapping[str, pl.DataFrame]) -> Plan:
    """Plan to read a frame instead of the files of `options.input`, with the same checks."""
    if options.engine == "spark":
        raise ConfigError("input: a frame is in the memory of this process, and Spark reads files. Leave out engine.")
    found = _plan(options, lambda: [FrameFile(frames["input"])])
    return replace(found, files=[FrameFile(frames["input"].select(found.log.columns()))])


def _plan(options: Options, find: Callable[[], list[InputFile]]) -> Plan:
    if (options.schema_file is None) == (options.label is None):
        fact = "Both --schema and --label are given" if options.label else "Neither --schema nor --label is given"
        raise ConfigError(f"{fact}. Give --schema, or --label COLUMN to guess a schema.")
    if options.spark_master is not None and options.engine != "spark":
        raise ConfigError("--spark-master needs --engine spark.")
    if "max_bad_rows" in options.changed_keys() and options.on_bad_row == "fail":
        raise ConfigError("--max-bad-rows needs --on-bad-row skip.")
    log_schema = None
    if options.schema_file:
        log_schema = load_schema(options.schema_file, lambda section: columns_of(find()[0], section))
    files = find()
    guessed = ""
    if log_schema is None:
        section = described(files[0], None)
        section, clicks, guesses = guess(files, options.label, section)
        guessed = as_toml(section, clicks, guesses)
        for found in guesses:
            log.info("%s: %s (%s)", found.column, found.kind, found.why)
        log_schema = checked_schema(tomllib.loads(guessed), "the guessed schema")
    check_split(log_schema.split, [file.name for file in files])
    check_columns(
        files,
        log_schema.input,
        log_schema.columns(),
        copied=log_schema.keep.columns,
        type_problems=partial(type_problems, log_schema),
    )
    max_bad_rows = options.max_bad_rows if options.on_bad_row == "skip" else None
    return Plan(log_schema, files, guessed, options.engine, options.spark_master, max_bad_rows)


def write(plan: Plan, work: Work) -> Description:
    size = sum(int(path.stat().st_size * expansion(path)) for path in plan.files)
    copies = 3 if plan.engine == "spark" else 2  # with encoded rows in the scratch directory
    check_disk(work, copies * size, sum(num_rows(path, plan.log.input) for path in plan.files))
    if plan.engine == "spark":
        from recmill.datasets.own_clicks import spark

        return spark.write(plan, work)
    with ThreadPoolExecutor(num_cores()) as pool:
        return prepared(plan, work, _OneMachine(plan, work, pool))


class Engine(Protocol):
    """Does the steps whose time grows with the rows."""

    blocks: "Blocks"
    skipped: BadRows

    def times_at(self, places: list[int]) -> list[int]:
        """Return the times at these places of all times in ascending order."""

    def counted(self, splits: Splits) -> dict[str, list[int]]:
        """Return the rows and the clicks of each split, and the rows that are not used."""

    def found(self, splits: Splits, training_rows: int) -> Found:
        """Return what the training rows hold."""

    def encoded(self, encoder: Encoder, splits: Splits) -> "Iterator[Encoded]":
        """Yield all rows in their order, and count in `encoder` what the training rows hold."""


def prepared(plan: Plan, work: Work, engine: Engine) -> Description:
    """Do the steps in their order, each once, although the work may be interrupted."""
    log, rows = plan.log, engine.blocks.rows
    if not rows:
        raise DataError(f"{plan.files[0]}: no rows. Give files that have some.")
    splits = Splits(log, work.part("split", lambda: split_rules(log, rows, engine.times_at)))
    counts = work.part("count", lambda: engine.counted(splits))
    if not sum(counts["clicks"]):
        raise DataError(_no_clicks(log, engine.blocks))
    _check_classes(counts, log)
    training_rows = counts["rows"][SPLITS.index("train")]

    def learn() -> dict[str, Any]:
        found = engine.found(splits, training_rows)
        return Recipe(log=log, learned=learned(log, found, work.data)).model_dump(mode="json")

    encoder = Encoder(Recipe.model_validate(work.part("learn", learn), strict=False), work.data)
    tally = work.part("write", lambda: _written(work.data, encoder, engine.encoded(encoder, splits), counts["rows"]))
    of_training = {"tally": tally, "training_rows": training_rows}
    write_text(work.data / RECIPE_FILE, encoder.recipe.model_copy(update=of_training).model_dump_json(indent=1))
    return _sealed(plan, work.data, encoder, counts, tally, engine.skipped.notes())


class _OneMachine:
    """The engine that uses the threads of this process."""

    def __init__(self, plan: Plan, work: Work, pool: Executor) -> None:
        self._log, self._data, self._scratch, self._pool = plan.log, work.data, work.scratch, pool
        found: list[Kept] = []
        each = partial(ordered, pool, ahead=min(1, _MAX_TEXTS - num_cores()))
        for index, file in enumerate(plan.files):
            keeper = Keeper(work.scratch, index, file, plan.inputs[str(file.absolute())], pool, each)
            found.append(work.part(f"read-{index}", partial(keeper.keep, plan.log, plan.max_bad_rows)))
        self.skipped = all_skipped(plan.max_bad_rows, found)
        blocks = [kept["blocks"] for kept in found]
        self.blocks = Blocks(work.scratch, list(zip(map(str, plan.files), blocks, strict=True)))

    def times_at(self, places: list[int]) -> list[int]:
        return values_at(places, lambda: (counted_times(rows, self._log) for _, rows in self.blocks))

    def counted(self, splits: Splits) -> dict[str, list[int]]:
        return counted(splits, self.blocks.with_progress("splitting"))

    def found(self, splits: Splits, training_rows: int) -> Found:
        learner = Learner(self._log, training_rows, scratch=self._scratch)
        return found(learner, splits, self.blocks.with_progress("learning"))

    def encoded(self, encoder: Encoder, splits: Splits) -> "Iterator[Encoded]":
        encode = block_encoder(encoder, Encoder(encoder.recipe, self._data), splits)
        with Progress("writing", self.blocks.rows, "rows") as progress:
            for parts in ordered(self._pool, encode, self.blocks, ahead=1):
                yield from parts
                progress.advance(sum(len(part.rows) for part in parts))


def all_skipped(max_bad_rows: int | None, files: list[Kept]) -> BadRows:
    """Return the bad rows of all files together; raise an error if there are too many."""
    count, first = sum(kept["skipped"] for kept in files), [problem for kept in files for problem in kept["first"]]
    skipped = BadRows(max_bad_rows or 0, count, first[:NAMED_BAD_ROWS])
    if count > skipped.allowed:
        raise DataError(f"{count:,} rows are bad, more than --max-bad-rows allows. The first: {first[0]}.")
    return skipped


class Keeper:
    """Keeps the needed columns of the rows of a file, so that text is parsed once.

    Values of most columns have codes, with the values in Arrow files of their own: a new set of codes begins with each
    file, and when there are too many. Arrow files hold the other columns.
    """

    def __init__(
        self,
        scratch: Path,
        index: int,
        file: InputFile,
        state: list[int | str],
        pool: Executor,
        each: "Each" = map,  # applies a function to each block of a text; it may do so ahead, in threads
    ) -> None:
        self._scratch, self._index, self._pool, self._each = scratch, index, pool, each
        self._file, self._state = file, state

    def keep(self, log: ClicksSchema, max_bad_rows: int | None) -> Kept:
        bad_rows = BadRows(max_bad_rows or 0)
        index = self._index
        kept: list[KeptBlock] = []
        coders: dict[str, Coder] = {}
        number = 0
        before, was_plain = 0, True
        for block in self._read(log, None if max_bad_rows is None else bad_rows):
            is_plain = isinstance(block, Fields)
            if coders and (is_plain != was_plain or sum(map(len, coders.values())) > _MAX_VALUES):
                self._keep_values(coders, kept[-1][3])
                coders, number = {}, number + 1
            was_plain = is_plain
            name = f"rows-{index}-{len(kept)}"
            first = before + 1
            if isinstance(block, RawRows):
                first = int(block.numbers[0])
                with replaced(self._scratch / f"{name}.npy") as path:
                    write_npy(path, np.asarray(block.numbers), np.int64)
                block = block.frame
            rest, codes = self._numbered(block, log, coders)
            if isinstance(block, Fields):
                block.free()
            if rest.width:
                write_arrow(self._scratch / f"{name}.arrow", rest)
            with replaced(self._scratch / f"{name}.codes") as path, path.open("wb") as file:
                file.writelines(part.data for part in codes)
            kept.append((name, first, block.height, f"values-{index}-{number}", [*coders]))
            before += block.height
        if coders:
            self._keep_values(coders, kept[-1][3])
        if file_state(self._file) != self._state:
            fact = "it changed while it was read. Wait until it is complete, then prepare it again."
            raise DataError(f"{self._file}: {fact}")
        return {"blocks": kept, "skipped": bad_rows.count, "first": bad_rows.first}

    def _read(self, log: ClicksSchema, bad_rows: BadRows | None) -> Iterator[pl.DataFrame | Fields | RawRows]:
        """Yield the blocks of the file; the next one is read meanwhile."""
        blocks: Iterator[pl.DataFrame | Fields | RawRows]
        if bad_rows is None:
            blocks = read_blocks(self._file, log.input, log.columns(), log.coded_columns(), self._each)
        else:
            blocks = good_blocks(self._file, log, bad_rows)
        with ThreadPoolExecutor(1) as reader:
            waiting = reader.submit(next, blocks, None)
            while (block := waiting.result()) is not None:
                waiting = reader.submit(next, blocks, None)
                yield block

    def _numbered(
        self, block: pl.DataFrame | Fields, log: ClicksSchema, coders: dict[str, Coder]
    ) -> tuple[pl.DataFrame, list[np.ndarray]]:
        """Return the columns without codes, and the codes of the others, in the order of `coders`."""
        if isinstance(block, Fields):
            coded, rest = [*block.columns], block.others
        else:
            types = block.schema  # each access builds it anew
            coded = [name for name in log.coded_columns() if can_be_numbered(types[name])]
            rest = block.drop(coded)

        for name in coded:
            coders.setdefault(name, Coder())

        def numbered(places: range) -> list[np.ndarray]:
            return [self._codes(block, place, coded[place], coders[coded[place]]) for place in places]

        threads = min(num_cores(), len(coded))
        shares = list(self._pool.map(numbered, [range(first, len(coded), threads) for first in range(threads)]))
        return rest, [shares[place % threads][place // threads] for place in range(len(coded))]

    def _codes(self, block: pl.DataFrame | Fields, place: int, name: str, coder: Coder) -> np.ndarray:
        if isinstance(block, Fields):
            return coder.codes_of(*block.hashes_of(place), block.gather(place))
        return coder.codes(block[name])

    def _keep_values(self, coders: dict[str, Coder], name: str) -> None:
        def keep(index: int, column: str, coder: Coder) -> None:
            write_arrow(self._scratch / f"{name}-{index}.arrow", coder.values().alias(column).to_frame())

        for _ in self._pool.map(keep, range(len(coders)), coders.keys(), coders.values()):
            pass


class Blocks:
    """The rows that were kept of some files, one after the other. `before`: how many rows are before them."""

    def __init__(self, scratch: Path, files: list[tuple[str, list[KeptBlock]]], before: int = 0) -> None:
        self._scratch, self._before = scratch, before
        self._kept = [(file, *block) for file, blocks in files for block in blocks]
        self.rows = sum(block[3] for block in self._kept)
        self._values: tuple[str, dict[str, Values]] = ("", {})  # the last that were read: of most files, all

    def __iter__(self) -> Iterator[Block]:
        before = self._before
        for file, name, first, rows, values_name, coded in self._kept:
            rest = self._scratch / f"{name}.arrow"
            frame = read_arrow(rest) if rest.exists() else pl.DataFrame()
            if values_name != self._values[0]:
                paths = [self._scratch / f"{values_name}-{index}.arrow" for index in range(len(coded))]
                read = {c: Values(read_arrow(path).to_series()) for c, path in zip(coded, paths, strict=True)}
                self._values = values_name, read
            values = self._values[1]
            codes = {}
            if coded:
                with (self._scratch / f"{name}.codes").open("rb") as opened:  # np.load would take 0.5 ms more
                    stored = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint32)
                codes = {c: (values[c], own) for c, own in zip(coded, stored.reshape(-1, rows), strict=True)}
            path = self._scratch / f"{name}.npy"  # is there if rows may be skipped
            numbers = np.load(path) if path.exists() else range(first, first + rows)
            yield before, RawRows(frame, file, numbers, codes, SKIP)
            before += rows

    def with_progress(self, what: str) -> Iterator[Block]:
        with Progress(what, self.rows, "rows") as progress:
            for before, rows in self:
                yield before, rows
                progress.advance(len(rows))


def values_at(places: list[int], blocks: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]) -> list[int]:
    """Return the whole numbers at these places of all in ascending order, which need not fit into memory.

    Blocks hold values, and how often each occurs. In each round, the values are counted in `_RANGES` equal ranges, and
    the range with the place is divided again.
    """
    ends = [(values.min(), values.max()) for values, _ in blocks() if len(values)]
    low, high = int(min(end for end, _ in ends)), int(max(end for _, end in ends))
    found = [(low, high, place) for place in places]
    while any(low < high for low, high, _ in found):
        widths = [(high - low) // _RANGES + 1 for low, high, _ in found]
        counts = np.zeros((len(found), _RANGES), np.int64)
        for values, times in blocks():
            for count, (low, high, _), width in zip(counts, found, widths, strict=True):
                is_inside = (values >= low) & (values <= high)
                np.add.at(count, (values[is_inside] - low) // width, times[is_inside])
        for index, ((low, high, place), width) in enumerate(zip(found, widths, strict=True)):
            upto = np.cumsum(counts[index])
            which = int(np.searchsorted(upto, place, side="right"))
            start = low + which * width
            found[index] = start, min(start + width - 1, high), place - int(upto[which] - counts[index][which])
    return [low for low, _, _ in found]


def counted(splits: Splits, blocks: Iterable[Block]) -> dict[str, list[int]]:
    """Return the rows and the clicks of each split, and the rows that are not used."""
    rows, clicks = np.zeros(NUM_KINDS, np.int64), np.zeros(NUM_KINDS, np.int64)
    for before, block in blocks:
        which, is_click = splits.of(before, block)
        rows += np.bincount(which, minlength=NUM_KINDS)
        clicks += np.bincount(which, weights=is_click, minlength=NUM_KINDS).astype(np.int64)
    return {"rows": rows.tolist(), "clicks": clicks.tolist()}


def _no_clicks(schema: ClicksSchema, blocks: Iterable[Block]) -> str:
    """Say which labels there are, the most frequent first."""
    found: Counter[Any] = Counter()
    for _, block in blocks:
        found.update(dict(block.column(schema.label.column).value_counts().rows()))
    listed = ", ".join(f"{value!r} ({count:,} rows)" for value, count in found.most_common(10))
    remedy = "Name those that mean a click in label.positive."
    return f"column {schema.label.column}: no row is a click. Its values: {listed}. {remedy}"


def _check_classes(counts: dict[str, list[int]], log: ClicksSchema) -> None:
    for split, rows, clicks in zip(SPLITS, counts["rows"], counts["clicks"], strict=False):
        if not rows:
            key = f"{split}_from" if getattr(log.split, f"{split}_from", "") else split
            given = f" (split.{key} = {getattr(log.split, key)})" if split != "train" else ""
            raise DataError(f"no row is for {split}{given}. Change [split] of the schema.")
        if clicks in (0, rows):
            fact = f"column {log.label.column}: {clicks:,} of the {rows:,} rows for {split} are clicks"
            remedy = "Check label.positive and [split] of the schema."
            raise DataError(f"{fact}, so nothing can be learned or measured. {remedy}")


def found(learner: Learner, splits: Splits, blocks: Iterable[Block]) -> Found:
    """Return what the training rows of these blocks hold."""
    for before, block in blocks:
        is_training = splits.of(before, block)[0] == SPLITS.index("train")
        learner.see(block.where(is_training))
    return learner.found()


@dataclass(frozen=True)
class Encoded:
    """The rows of a block that belong to one split, with their weights and kept columns, if the schema has any."""

    split: int
    rows: ClickRows
    weights: np.ndarray | None
    kept: pl.DataFrame | None


def block_encoder(encoder: Encoder, others: Encoder, splits: Splits) -> Callable[[Block], list[Encoded]]:
    """Return a function that encodes a block: training rows by `encoder`, which counts what they hold."""
    log = encoder.recipe.log

    def encoded(block: Block) -> list[Encoded]:
        which, _ = splits.of(*block)
        parts = []
        for split, encode in enumerate((encoder, others, others)):
            if (is_own := which == split).any():
                own = block[1].where(is_own)
                rows = encode.encode(own)
                weight = weights(own, log) if log.keep.weight else None
                kept = own.frame.select(log.keep.columns) if log.keep.columns else None
                parts.append(Encoded(split, rows, weight, kept))
        return parts

    return encoded


def _written(data: Path, encoder: Encoder, parts: Iterable[Encoded], rows: list[int]) -> dict[str, Any]:
    """Write the files of each split, and return what the training rows held."""
    log = encoder.recipe.log
    sizes = [encoder.recipe.learned[feature.name].ids_per_row for feature in log.tables]
    writers = [SplitWriter(data, s, n, sizes, encoder.id_type) for s, n in zip(SPLITS, rows, strict=False)]
    has_weight = [not log.keep.weight] * len(writers)
    for part in parts:
        writer = writers[part.split]
        writer.append(part.rows)
        if part.weights is not None:
            writer.append_weights(part.weights)
            has_weight[part.split] |= bool(part.weights.any())
        if part.kept is not None:
            writer.append_kept(part.kept)
    for writer in writers:
        writer.close()
    if not all(has_weight):
        split = SPLITS[has_weight.index(False)]
        fact = f"column {log.keep.weight}: the weights of all rows for {split} are 0"
        remedy = "Correct them, or remove keep.weight from the schema."
        raise DataError(f"{fact}, so nothing can be learned or measured. {remedy}")
    return {feature.name: dict(encoder.tally.counts.get(feature.name, {})) for feature in log.feature}


def _notes(
    recipe: Recipe, rows: list[int], tally: dict[str, dict[str, int]], with_vocabulary: list[str]
) -> Iterator[str]:
    for kind, name in ((DROPPED_ROWS, "label.drop or label.missing"), (NOT_SAMPLED, "sample.negatives")):
        if rows[kind]:
            yield f"{rows[kind]:,} rows left out by {name}"
    yield from _uneven_groups(recipe, rows)
    for numeric in recipe.log.numeric:
        if tally[numeric.name]["missing"] == rows[SPLITS.index("train")]:
            yield f"{numeric.name}: no training row has a value"
    for feature in recipe.log.tables:
        name = feature.name
        if name in with_vocabulary and recipe.learned[name].rows == FIRST_VALUE:
            rare = "every value is rarer than min_frequency, so all of them share one row"
            yield f"{name}: {rare if tally[name].get('unseen') else 'no training row has a value'}"
        if recipe.learned[name].has_lists and (cut := tally[name].get("clipped", 0)):
            kept = recipe.learned[name].ids_per_row
            yield f"{name}: {cut:,} training rows have more than {kept} values; the rest is cut"
    untrained = [f.name for f in recipe.log.tables if getattr(f, "min_frequency", 2) == 1 and f.name in with_vocabulary]
    if untrained:
        yield f"min_frequency = 1: values that training never had will meet an untrained row of {', '.join(untrained)}"


def _uneven_groups(recipe: Recipe, rows: list[int]) -> Iterator[str]:
    """Say which splits are less than half, or more than twice, as large as they should be, because of large groups."""
    split = recipe.log.split
    of_split = [rows[0] + rows[NOT_SAMPLED], *rows[1 : len(SPLITS)]]
    for name, count, wanted in zip(SPLITS[1:], of_split[1:], (split.val, split.test), strict=True):
        share = count / sum(of_split)
        if split.group and isinstance(wanted, float) and not wanted / 2 <= share <= 2 * wanted:
            fact = f"{100 * share:.1f} % of the rows are for {name}, and split.{name} is {100 * wanted:g} %"
            yield f"{fact}: rows with the same {split.group} stay together, and some groups are large"


def _sealed(
    plan: Plan,
    data: Path,
    encoder: Encoder,
    counts: dict[str, list[int]],
    tally: dict[str, dict[str, int]],
    skipped: list[str],
) -> Description:
    sizes = [encoder.recipe.learned[feature.name].ids_per_row for feature in plan.log.tables]
    multi_hot = sizes if max(sizes) > 1 else []
    learned = [f.name for f in plan.log.tables if (data / vocabulary_file(f.name)).exists()]
    notes = [*skipped, *_notes(encoder.recipe, counts["rows"], tally, learned)]

    def describe(files: dict[str, FileInfo]) -> Description:
        return ClicksDescription(
            name="clicks",
            made_by=MADE_BY,
            recipe=plan.recipe,
            files=files,
            notes=notes,
            dense=plan.log.dense_names,
            dense_roles=plan.log.dense_roles,
            sparse=encoder.sparse_features(),
            keep=plan.log.keep.columns,
            weights=bool(plan.log.keep.weight),
            negatives=plan.log.sample.negatives,
            multi_hot=multi_hot,
            splits={
                split: [RowRange(day=split, start=0, stop=rows)]
                for split, rows in zip(SPLITS, counts["rows"], strict=False)
            },
        )

    ids = "sparse_multi_hot.npz" if multi_hot else "sparse.npy"
    parts = ["dense.npy", ids, "labels.npy", *(["keep.parquet"] if plan.log.keep.columns else [])]
    parts += ["weights.npy"] if plan.log.keep.weight else []
    rows_of = {f"{split}_{part}": rows for split, rows in zip(SPLITS, counts["rows"], strict=False) for part in parts}
    rows_of |= {vocabulary_file(name): encoder.recipe.learned[name].rows for name in learned}
    if plan.guessed:
        write_text(data / SCHEMA_FILE, plan.guessed)
        rows_of[SCHEMA_FILE] = 1
    return seal(data, describe, rows_of | {RECIPE_FILE: 1})
