"""The command line: flags only. Every body calls the function of the same name in `commands/`."""

import gc
import json
import os
import sys
import traceback
import typing
from dataclasses import asdict
from typing import Any

import click

from recmill import __version__, registry
from recmill.errors import as_user_error
from recmill.launch.local import is_launched, leave, own_rank
from recmill.observe.printed import (
    print_audit,
    print_checkpoint,
    print_checkpoints,
    print_dataset,
    print_table,
    print_values,
    value_rows,
)

_DEBUG = "--debug"  # understood anywhere on the line
_SEE_WHERE = f"\nRun again with {_DEBUG} to see where."


def main() -> None:
    """Ends with 0, or with the exit code of the error's kind; one clear message and no traceback unless asked for."""
    gc.set_threshold(200_000, 20, 20)  # imports make many objects that stay: looking among them cost 0.2 s a command
    code = _run([argument for argument in sys.argv[1:] if argument != _DEBUG])
    if is_launched():
        leave(code)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    try:
        code = commands.main(args=arguments, prog_name="recmill", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _tell("stopped at once; what was committed before is whole")
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 141
    except Exception as error:
        if _DEBUG in sys.argv:
            _tell("".join([*getattr(error, "__notes__", []), getattr(error, "traceback", "")]))
            _tell("".join(traceback.format_exception(error)))
        known = as_user_error(error)
        if known is None:
            _tell(f"recmill: a defect, not your mistake: {type(error).__name__}: {error}{_SEE_WHERE}")
            return 1
        _tell(f"recmill: {known.kind}: {known}{_SEE_WHERE if hasattr(error, 'traceback') else ''}")
        return known.exit_code


def _tell(text: str) -> None:
    rank = own_rank()
    print(f"[rank {rank}] {text}" if rank else text, file=sys.stderr)


class _Datasets(click.Group):
    """One sub-command per registered dataset; its flags are the fields of its Options."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(registry.DATASETS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        module = registry.load(registry.DATASETS, cmd_name, "dataset")
        options = [_option(name, field) for name, field in module.Options.model_fields.items()]
        output = click.Option(["--output"], required=True, help="Directory to write; it appears when it is whole.")
        overwrite = click.Option(["--overwrite"], is_flag=True, help="Replace the dataset that is there.")

        def body(output: str, overwrite: bool, **values: Any) -> None:
            from recmill.commands.prepare import prepare

            given = {name: value for name, value in values.items() if value is not None}
            print_dataset(prepare(cmd_name, output, overwrite=overwrite, **given))

        summary = (module.__doc__ or "").strip().splitlines()[0]
        return click.Command(
            cmd_name, callback=body, params=[output, *options, overwrite], help=module.__doc__, short_help=summary
        )


def _option(name: str, field: Any) -> click.Option:
    """The flag of an Options' field; a field that may be None is a flag that need not be given."""
    kind: Any = field.annotation
    if type(None) in typing.get_args(kind):
        kind = next(part for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    is_list = typing.get_origin(kind) is list
    default = ",".join(map(str, field.default)) if is_list and field.default else field.default
    if is_list:
        kind = _IntList()
    elif typing.get_origin(kind) is typing.Literal:
        kind = click.Choice(typing.get_args(kind))
    is_required = field.is_required()
    return click.Option(
        [f"--{name.replace('_', '-')}"],
        type=kind,
        is_flag=kind is bool,
        required=is_required,
        default=None if is_required else default,
        show_default=True,
        help=field.description,
    )


class _IntList(click.ParamType):
    name = "INTEGERS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        try:
            return [int(part) for part in str(value).split(",")]
        except ValueError:
            self.fail(f"{value!r}: expected whole numbers with commas between them, like 10,1000,50000.", param, ctx)


class _Names(click.ParamType):
    name = "NAMES"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        return [part.strip() for part in str(value).split(",")]


_procs = click.option(
    "--procs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes on this machine."
)
_verify = click.option("--verify", is_flag=True, help="Check every byte of the dataset before starting.")
_checkpoint = click.option(
    "--checkpoint",
    type=click.Choice(["newest", "best"]),
    default="newest",
    show_default=True,
    help="best: in validation, where checkpoint.keep_best was set.",
)
_fallback = click.option(
    "--fallback", is_flag=True, help="If the newest checkpoint is damaged, take the newest that is not."
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(_DEBUG, is_flag=True, help="Show tracebacks; may stand anywhere on the line.")
@click.version_option(__version__, prog_name="recmill")
def commands(debug: bool) -> None:
    """Train recommenders with very large embedding tables, from a laptop to a cluster."""
    from recmill.observe.log import set_up_console

    set_up_console()


@commands.group("prepare", cls=_Datasets)
def prepare_command() -> None:
    """Make a prepared dataset."""


@commands.command("download")
@click.argument("name", type=click.Choice(["movielens", "goodreads"]))
@click.option(
    "--variant",
    type=click.Choice(["ml-100k", "ml-1m", "ml-20m", "ml-25m", "interactions", "books", "book-ids"]),
    help="Of movielens: ml-1m if not given; of goodreads: interactions. books, book-ids: for their titles.",
)
@click.option(
    "--output", required=True, type=click.Path(), help="Directory of raw data; VARIANT/ or a file goes there."
)
@click.option("--url", help="Another address of the same file, such as a mirror's; its checksum must be the same.")
def download_command(name: str, output: str, variant: str | None, url: str | None) -> None:
    """Fetch public raw data, checked: MovieLens or Goodreads. Mind their terms of use."""
    from recmill.commands.download import download

    print(download(name, output, variant=variant, url=url))


@commands.command("split")
@click.option("--input", required=True, type=click.Path(), help="One raw log: plain, .gz or .zst.")
@click.option("--output", required=True, type=click.Path(), help="Directory to write; it appears when it is whole.")
@click.option("--lines", type=int, default=5_000_000, show_default=True, help="Lines of each part.")
@click.option("--days", type=int, default=24, show_default=True, help="Parts: day_0, day_1, ...; the rest is left out.")
def split_command(input: str, output: str, lines: int, days: int) -> None:
    """Cut one raw log into parts, to be prepared like days of a large one."""
    from recmill.commands.split import split

    split(input, output, lines=lines, days=days)


@commands.command("adopt")
@click.argument("directory", type=click.Path())
@click.option(
    "--last-day",
    type=click.Choice(["val-first", "test-first", "none"]),
    default="val-first",
    show_default=True,
    help="Its halves are for validation and test, in this order; none: train on everything.",
)
@click.option(
    "--val-fraction", type=float, help="Share of the rows for validation, and as many for test: of a single day (0.1)."
)
@click.option(
    "--table-size", type=_IntList(), help="For all tables, or one each, like 10,1000.  [default: largest id + 1]"
)
@click.option("--dense-transform", metavar="TEXT", help="How the dense values were made, like 'log(x+3)': a note.")
def adopt_command(directory: str, **options: Any) -> None:
    """Make a dataset of npy files in DIRECTORY that TorchRec's or MLPerf's scripts wrote."""
    from recmill.commands.adopt import adopt

    print_dataset(adopt(directory, **options))


@commands.command("audit")
@click.argument("dataset", type=click.Path())
@click.option("--memory-budget", default="2GB", show_default=True, help="Most memory to use; less means more readings.")
@_json
def audit_command(dataset: str, memory_budget: str, as_json: bool) -> int:
    """What in the click log DATASET would make a result wrong. Ends with 3 if anything would, else 0."""
    from recmill.commands.audit import audit

    report = audit(dataset, memory_budget=memory_budget)
    if as_json:
        print(json.dumps({**asdict(report), "failures": report.num_failures}))
    else:
        print_audit(report)
    return 3 if report.num_failures else 0


@commands.command("train")
@click.argument("config", type=click.Path())
@click.option(
    "--run",
    "--run-dir",  # torchrun takes '--run' for a short form of its own '--run-path'
    required=True,
    type=click.Path(),
    help="Run directory; an interrupted one goes on where it stopped.",
)
@_procs
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a config key, like optim.dense.lr=0.02."
)
@click.option(
    "--init-from", metavar="RUN", type=click.Path(), help="A new run starts from this one's newest checkpoint."
)
@click.option(
    "--allow-partial", is_flag=True, help="With --init-from: take the tables and layers that have the same size."
)
@_fallback
@_verify
def train_command(config: str, run: str, **options: Any) -> None:
    """Train the model of CONFIG (a TOML file) and test it.

    Ends with 0 when it is done; asked to stop, it saves and ends with 75 (SIGTERM, SIGUSR1, SIGUSR2) or 130 (Ctrl-C).
    """
    from recmill.commands.train import train

    train(config, run, **options)
    if own_rank() == 0:
        _print_results([run])


@commands.command("evaluate")
@click.argument("run", type=click.Path())
@click.option(
    "--split", type=click.Choice(["val", "test"]), default="test", show_default=True, help="What to evaluate on."
)
@_checkpoint
@_fallback
@click.option(
    "--protocol",
    "protocols",
    type=_Names(),
    help="How sequence models rank targets: full, pop100, uni100, with commas between them.  [default: the run's]",
)
@click.option("--k", "ks", type=_IntList(), help="Cut-offs of ranking metrics, like 1,5,10.  [default: the run's]")
@click.option(
    "--bootstrap",
    type=int,
    default=0,
    metavar="N",
    help="95 % intervals of ranking metrics, by N resamples of the users.",
)
@_procs
@_verify
@_json
def evaluate_command(run: str, split: Any, as_json: bool, **options: Any) -> None:
    """Evaluate the newest or best checkpoint of RUN; sequence models beside ranking by popularity."""
    from recmill.commands.evaluate import evaluate
    from recmill.commands.results import best_of_run

    values = evaluate(run, split=split, **options)
    if own_rank() != 0:
        return
    if as_json:
        print(json.dumps(values))
    else:
        print_values(split, values, best_of_run(run, split))


@commands.command("recommend")
@click.argument("run", type=click.Path())
@click.option("--history", help="Original ids or titles of items, oldest first, with commas between them.")
@click.option("--users", help="Original ids of users of the dataset, with commas between them.")
@click.option("--all", "is_for_all", is_flag=True, help="Every user of the dataset; needs --output.")
@click.option("--output", type=click.Path(), help="Parquet file to write: user, rank, item, title, score.")
@click.option("--k", type=int, default=10, show_default=True, help="How many items.")
@click.option("--include-seen", is_flag=True, help="Also items that are in the history already.")
@_checkpoint
@_fallback
@_json
def recommend_command(
    run: str,
    history: str | None,
    users: str | None,
    is_for_all: bool,
    output: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """The K items that RUN's model puts next: after a history, for users of its dataset, or for all of them."""
    from recmill.commands.recommend import recommend, recommend_all

    if (history is not None) + (users is not None) + is_for_all != 1:
        raise click.UsageError("Give exactly one of --history, --users and --all.")
    if is_for_all != (output is not None):
        raise click.UsageError("--all and --output go together: everyone's items are written to a file.")
    if output is not None:
        done = recommend_all(run, output, **options)
        print(json.dumps(done) if as_json else f"{done['rows']:,} rows for {done['users']:,} users: {done['output']}")
        return
    rows = recommend(run, history, users=users, **options)
    if as_json:
        print(json.dumps(rows))
    else:
        columns = ["user", "rank", "item", "title"] if users is not None else ["item", "title"]
        cells = [[*(str(row[column]) for column in columns), f"{row['score']:.3f}"] for row in rows]
        print_table([*columns, "score"], cells)


@commands.group("checkpoint")
def checkpoint_group() -> None:
    """What checkpoints a run has, and whether they are whole."""


@checkpoint_group.command("list")
@click.argument("run", type=click.Path())
@_json
def checkpoint_list_command(run: str, as_json: bool) -> None:
    """Steps, kinds and sizes of RUN's checkpoints; of their files names and sizes are checked."""
    _print_checkpoints(run, as_json, digests=False)


@checkpoint_group.command("verify")
@click.argument("run", type=click.Path())
@_json
def checkpoint_verify_command(run: str, as_json: bool) -> int:
    """Read every byte of RUN's checkpoints and compare digests. Ends with 4 if any is damaged, else 0."""
    return 0 if _print_checkpoints(run, as_json, digests=True) else 4


@checkpoint_group.command("inspect")
@click.argument("run", type=click.Path())
@click.option("--step", type=int, help="Of which checkpoint.  [default: the newest]")
@_json
def checkpoint_inspect_command(run: str, step: int | None, as_json: bool) -> None:
    """State and tensors of one of RUN's checkpoints: tables with their optimizer's state, layers."""
    from recmill.commands.checkpoint import inspect_checkpoint

    facts = inspect_checkpoint(run, step=step)
    if as_json:
        print(json.dumps(facts))
    else:
        print_checkpoint(facts)


def _print_checkpoints(run: str, as_json: bool, digests: bool) -> bool:
    """True if all are whole."""
    from recmill.commands.checkpoint import list_checkpoints

    found = list_checkpoints(run, digests=digests)
    print(json.dumps(found)) if as_json else print_checkpoints(found)
    return all(facts["health"] == "complete" for facts in found)


@commands.command("results")
@click.argument("runs", nargs=-1, required=True, type=click.Path())
def results_command(runs: tuple[str, ...]) -> None:
    """What RUNS have reached on their test split, and where their files are."""
    _print_results(list(runs))


@commands.command("doctor")
def doctor_command() -> int:
    """What is installed, does it fit together, what to run if not. Ends with 0 if training would work, else 5."""
    from recmill.commands.doctor import doctor, would_work

    checks = doctor()
    marks = {True: "ok", False: "PROBLEM"}
    print_table(["check", "", "found"], [[check.name, marks[check.is_good], check.found] for check in checks])
    for check in checks:
        if not check.is_good:
            print(f"{check.name}: {check.remedy}")
    print(
        "Training would work."
        if would_work(checks)
        else "Training would not work before the problems above are mended."
    )
    return 0 if would_work(checks) else 5


def _print_results(runs: list[str]) -> None:
    from recmill.commands.results import results

    rows = []
    for reached in results(*runs):
        for name, value, best in value_rows(reached.values, reached.best):
            rows.append([reached.run, reached.model, name, value, best])
    print_table(["run", "model", "test metric", "reached", "best reachable"], rows)
    for run in runs:
        print(f"{run}/: config.toml env.json status.json log.txt metrics.jsonl results.json checkpoints/")
