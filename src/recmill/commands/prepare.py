"""`recmill prepare`: raw or synthetic data -> a prepared dataset."""

import logging
import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, cast

from recmill import registry
from recmill.commands.keywords import named_arguments
from recmill.config.options import checked_options, given_path
from recmill.data.frames import as_polars, is_frame
from recmill.data.opening import open_dataset
from recmill.datasets.protocol import DatasetModule, FrameModule
from recmill.datasets.writing import PREPARATION_FILE, needs_writing, remove_finished_work, resumable_directory
from recmill.errors import ConfigError
from recmill.files.atomic import write_json
from recmill.launch.dftracer import files_log, recorded_files
from recmill.observe.counters import peak_bytes
from recmill.observe.printed import Printed, print_dataset
from recmill.observe.progress import human_rate, human_time
from recmill.schema import ClicksDescription, Description

log = logging.getLogger(__name__)


class PrepareOptions(TypedDict, total=False):
    """The options of all built-in datasets, for type checkers; `recmill prepare NAME --help` shows which one has which.

    Those of a plug-in are checked when it is called.
    """

    input: Any  # str, or a frame of pandas, Polars or Arrow
    seed: int
    # criteo
    source: Literal["1tb", "kaggle"] | None
    ids: Literal["contiguous", "mod", "hash64"] | None
    min_frequency: int | None
    id_order: Literal["frequency", "first-seen"] | None
    table_size: list[int] | None
    dense: Literal["log3", "log-min", "log2", "log1-clip"] | int | None  # a number: how many features to generate
    last_day: Literal["val-first", "test-first", "none"] | None
    val_fraction: float | None
    shuffle: Literal["none", "day", "global"] | None
    format: Literal["npy", "parquet", "bin"] | None
    multi_hot: list[int] | None
    multi_hot_distribution: Literal["uniform", "pareto"] | None
    memory_budget: str | None
    engine: Literal["polars", "spark"]
    spark_master: str | None
    compat: Literal["torchrec", "torchrec-fixed", "mlperf-v2", "oneflow"] | None
    sparse_input: str | None
    on_bad_row: Literal["fail", "skip"]
    max_bad_rows: int | None
    # clicks
    schema: str | Path | Mapping[str, Any] | None  # a file, the text of a schema, or what `guess_schema` returns
    label: str | None
    # histories, movielens, goodreads
    layout: Literal["rows", "lines", "jsonl"]
    user_column: str | None
    item_column: str | None
    time_column: str | None
    time_format: str | None
    rating_column: str | None
    columns: list[str] | None
    separator: str | None
    quotes: bool | None
    escape: bool | None
    encoding: str | None
    skip_lines: int | None
    no_user: bool
    only: list[str]
    title_columns: list[str] | None
    title_separator: str | None
    title_encoding: str | None
    titles: Any  # as `input`
    title_column: str | None
    title_id_column: str | None
    min_rating: float | None
    min_item_count: int
    min_user_count: int
    k_core: int
    repeats: Literal["first", "last", "keep"]
    only_read: bool
    min_interactions: int
    max_interactions: int
    book_ids: str | None
    # synthetic and random data
    rows: int
    days: int
    tables: list[int]
    click_rate: float
    signal: float
    users: int
    items: int
    interactions: int
    noise: float
    random_user_count: int
    random_item_count: int
    random_size: int


@named_arguments
def prepare(
    name: str, output: str | Path, *, overwrite: bool = False, **options: Unpack[PrepareOptions]
) -> dict[str, Any]:
    """Write dataset `name` to `output` and return its description; an identical dataset there is left as it is.

    Options are those of `recmill prepare NAME --help`, with underscores: prepare("synthetic-clicks", "d", rows=1000).
    An interrupted call, repeated, resumes. `input` of "clicks" and "histories", and `titles` of the latter, may be
    frames of pandas, Polars or Arrow.
    """
    module = cast(DatasetModule, registry.load(registry.DATASETS, name, "dataset"))
    frames = {option: value for option, value in options.items() if is_frame(value)}
    if unfit := [option for option in frames if option not in getattr(module, "FRAMES", ())]:
        raise ConfigError(f"{name}: `{unfit[0]}` is a path, not a frame. Frames are for 'clicks' and 'histories'.")
    checked = checked_options(name, module.Options, {**options, **dict.fromkeys(frames, "frame")})
    log.info("preparing %s in %s", name, output)
    if frames:
        read = {option: as_polars(value, option) for option, value in frames.items()}
        plan = cast(FrameModule, module).plan_frames(checked, read)
    else:
        plan = module.plan(checked)
    output = given_path(output, "--output").absolute()
    if needs_writing(output, name, plan.recipe, overwrite):
        started = time.monotonic()
        with (
            recorded_files(files_log(None, 0), [output.parent]),
            resumable_directory(output, plan.recipe, plan.inputs, discard=overwrite) as work,
        ):
            written = module.write(plan, work)
            facts = _facts(written, time.monotonic() - started, work.seconds)
            write_json(work.data / PREPARATION_FILE, facts)
        log.info("prepared %s in %s", name, output)
        log.info("%s", _described(facts))
    else:
        remove_finished_work(output)
        log.info("%s is already prepared: nothing to do", output)
    description = open_dataset(output).description
    for note in description.notes:
        log.info("note: %s", note)
    return Printed(description.model_dump(mode="json"), print_dataset)


def _facts(description: Description, seconds: float, phases: Mapping[str, float]) -> dict[str, Any]:
    """Return how fast this process prepared a dataset; what an interrupted one had done before is not counted."""
    if isinstance(description, ClicksDescription):
        rows = sum(part.stop - part.start for parts in description.splits.values() for part in parts)
    else:
        rows = description.num_interactions
    of_children = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {
        "seconds": round(seconds, 3),
        "phases": {name: round(spent, 3) for name, spent in phases.items()},
        "rows": rows,
        "rows_per_s": round(rows / max(seconds, 1e-9), 1),
        "peak_memory_bytes": max(peak_bytes(), of_children),
    }


def _described(facts: dict[str, Any]) -> str:
    phases = "".join(f"; {name} {spent:.1f} s" for name, spent in facts["phases"].items() if spent >= 0.1)
    rate = f"{human_rate(facts['rows_per_s'])} rows/s"
    return f"{human_time(facts['seconds'])}, {rate}, peak memory {facts['peak_memory_bytes'] / 1e9:.2f} GB{phases}"
