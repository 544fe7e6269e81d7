"""The command line: calls the function of the same name in `commands/`, prints what it returns, and reports errors."""

import contextlib
import functools
import gc
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.text import Text

import recmill  # imports each command at its first use
from recmill import errors, registry
from recmill.commands.flags import Command, flags
from recmill.config.suggested import training_command
from recmill.environment import errors_directory, is_launched, process_environment
from recmill.errors import ConfigError, ResourceError, as_user_error
from recmill.launch.early import begin, end_with, leave, restore_default_signals
from recmill.launch.failures import WorkerError, report_failure
from recmill.launch.processes import needs_worker
from recmill.observe import printed, printed_plan, printed_runs
from recmill.observe.progress import CONSOLE

_PROCESSES = re.compile(r"(n|num_)?_?gpus?|nproc(_per_node|s)?|(num_)?(workers|processes)|world_size|devices")
_DEBUG = "--debug"  # accepted anywhere on the command line


def main() -> None:
    """Run a command and exit with 0 or the exit code of its error; print one message, and a traceback with --debug."""
    begin()
    errors.names_flags = True
    gc.set_threshold(200_000, 20, 20)  # scanning the many objects that imports create took 0.2 s per command
    code = _run([argument for argument in sys.argv[1:] if argument != _DEBUG])
    if is_launched() or "torch" in sys.modules or needs_worker(sys.argv[1:]):
        leave(code)  # tearing torch down takes 0.3 s; Polars, which prints the results of a worker, 0.05 s
    end_with(code)


def _run(arguments: list[str]) -> int:
    try:
        code = commands.main(args=arguments, prog_name="recmill", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.ctx:
            error = _with_key(error, error.ctx.command)
        elif isinstance(error, click.UsageError):
            error = _with_equals_sign(error, arguments)
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _print_error("recmill: interrupted; what was committed before is complete")
        return 130
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not error.code:  # click's, after it has printed completions for a shell
            return 0
        _discard_stdout()  # the reader of our output closed the pipe, as `| head` does
        return 141
    except Exception as error:
        if (folder := errors_directory()) is not None:
            report_failure(folder, _rank(), error)
        if _DEBUG in sys.argv:
            _print_error("".join(traceback.format_exception(error)))
        known = as_user_error(error)
        if known is None:
            fact = f"{type(error).__name__}: {error}"
            if place := registry.place_in_plugin(error):
                _print_error(f"recmill: error: {place}{fact}\nRun again with {_DEBUG} to see the traceback.")
            else:
                _print_error(f"recmill: internal error; please report it with {_DEBUG} output: {fact}")
            return 1
        hint = f"\nRun again with {_DEBUG} to see the traceback." if isinstance(error, WorkerError) else ""
        _print_error(f"recmill: {known.kind}: {known}{hint}")
        return known.exit_code


def _with_equals_sign(error: click.UsageError, arguments: list[str]) -> click.UsageError:
    """Say how --set is written, if there is a `--set KEY VALUE` among the arguments."""
    for flag, key, value in zip(arguments, arguments[1:], arguments[2:], strict=False):
        if flag == "--set" and "=" not in key and not value.startswith("-"):
            return click.UsageError(f"--set takes KEY=VALUE: --set {key}={value}", error.ctx)
    return error


def _with_key(error: click.NoSuchOption, command: click.Command) -> click.UsageError:
    """Suggest what somebody means who names GPUs or workers, an argument, or a config key with a flag."""
    from recmill.commands.keywords import keys_instead

    flags = {parameter.name: parameter for parameter in command.params if parameter.name}
    name = error.option_name.lstrip("-").replace("-", "_")
    known = [*flags, *(form.lstrip("-") for parameter in command.params for form in parameter.opts)]
    arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
    hint = ""
    if error.ctx and any(name == argument.name for argument in arguments):
        usage = " ".join([error.ctx.command_path, *(argument.make_metavar(error.ctx) for argument in arguments)])
        hint = f"Give {name.upper()} without a flag: {usage}"
    elif "procs" in flags and _PROCESSES.fullmatch(name):
        hint = (
            "Did you mean '--procs N'? It is the number of processes on a machine; each uses one GPU, if there are any."
        )
    elif "overrides" in flags and (keys := keys_instead(name, known)):
        hint = f"Did you mean {' or '.join(f'--set {key}=VALUE' for key in keys)}?"
    return click.UsageError(f"No such option '{error.option_name}'. {hint}", error.ctx) if hint else error


def _rank() -> int:
    try:
        return process_environment().rank
    except ConfigError:  # the error is about the rank
        return 0


def _print_error(text: str) -> None:
    rank = _rank()
    with contextlib.suppress(OSError):  # nobody reads stderr
        text = printed.escaped(f"[rank {rank}] {text}" if rank else text, keep="\n\t")
        if not sys.stderr.isatty():
            print(text, file=sys.stderr, flush=True)
            return
        kind = re.match(r"recmill: [a-z ]+: ", text)
        shown = Text(printed.fitted(text))
        shown.stylize("bold red", 0, kind.end() if kind else 0)
        CONSOLE.print(shown)


def _discard_stdout() -> None:
    """Send what is left in the buffer of stdout nowhere; otherwise Python's flush at exit fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_written(print_text: Callable[..., None], *values: Any) -> None:
    """Print what a command has written to files: it succeeded, even if nobody reads stdout."""
    try:
        print_text(*values)
        sys.stdout.flush()
    except OSError:
        _discard_stdout()


# By topic, the commands and what `recmill --help` says about them: at most 60 characters, so that 80 columns suffice.
_TOPICS = {
    "Data": {
        "download": "Download public raw data: MovieLens, Goodreads, Criteo 1TB.",
        "split": "Split one raw log into parts, like the days of a large one.",
        "schema": "Guess the columns of a click log, and write a schema.",
        "prepare": "Make a prepared dataset.",
        "adopt": "Use files prepared by TorchRec's or MLPerf's scripts.",
        "audit": "Find what in a click log would make results wrong.",
    },
    "Training": {
        "configs": "List, show or copy the configs that come with Recmill.",
        "train": "Train the model of a config and test it.",
        "tune": "Search for better values of a config's keys.",
        "run-like": "Run a command line of TorchRec's, MLPerf's or other scripts.",
        "plan": "Forecast memory, speed and time of a run on given machines.",
        "checkpoint": "List, verify or inspect checkpoints; read or replace rows.",
    },
    "Results": {
        "results": "Show state, best step and test metrics of runs.",
        "evaluate": "Evaluate the newest or best checkpoint of a run.",
        "predict": "Score new rows, or items after new histories.",
        "recommend": "Recommend items with a sequence model or two towers.",
        "items": "Write the vectors of items or requests of a two-tower model.",
        "explain": "Show which features or items a model relies on.",
        "compare": "Compare two runs: config, metrics, speed, curves.",
        "plot": "Draw the learning curves of runs.",
        "report": "Write one HTML file about runs.",
        "trace": "Merge what the processes did into a timeline for Perfetto.",
        "export-metrics": "Write metrics as CSV, or for TensorBoard, W&B or MLflow.",
    },
    "Jobs": {
        "launch": "Start a run with Slurm, PBS, Kubernetes, MPI or others.",
        "status": "Show the state of a run and of its job.",
        "logs": "Print the output of a run's newest job.",
        "cancel": "Stop a run's jobs after they have saved.",
    },
    "Installation": {
        "doctor": "Check the installation and say how to fix it.",
        "check-plugin": "Check a model, dataset or metric of your own.",
    },
}


class _Commands(click.Group):
    """All commands, listed by topic in the help."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for topic, summaries in _TOPICS.items():
            with formatter.section(topic):
                formatter.write_dl([(name.ljust(width), text) for name, text in summaries.items()])


class _Datasets(click.Group):
    """One sub-command per registered dataset, whose flags are the fields of the dataset's `Options`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*registry.DATASETS, *registry.installed("dataset")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        def prepare(output: str, **values: Any) -> None:
            given = {name: value for name, value in values.items() if value is not None}
            description = recmill.prepare(cmd_name, output, **given)
            _print_written(printed.print_prepared, description, training_command(Path(output)))

        try:
            module = registry.load(registry.DATASETS, cmd_name, "dataset")
        except ConfigError as error:
            if cmd_name in registry.installed("dataset"):  # an installed package that is broken: the others can be used
                return _broken_command(cmd_name, error)
            raise
        parameters: list[click.Parameter] = [
            click.Option(
                ["--output"], required=True, help="Directory to write; it appears when the dataset is complete."
            ),
            *flags(module.Options),
            click.Option(["--overwrite"], is_flag=True, help="Replace an existing dataset."),
        ]
        summary = ((module.__doc__ or "").strip() or cmd_name).splitlines()[0]
        return click.Command(cmd_name, callback=prepare, params=parameters, help=module.__doc__, short_help=summary)


def _broken_command(name: str, error: ConfigError) -> click.Command:
    """Return a command that raises the error whatever its arguments are."""

    def fail(arguments: tuple[str, ...]) -> None:
        raise error

    anything: list[click.Parameter] = [click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)]
    settings = {"ignore_unknown_options": True}
    return click.Command(name, settings, fail, anything, help=str(error), short_help="(cannot be used)")


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _print(report: Any, as_json: bool, print_text: Callable[[Any], None]) -> None:
    if as_json:
        print(json.dumps(report, default=asdict))
    else:
        print_text(report)


def _prints(
    print_text: Callable[[Any], None], exit_code: Callable[[Any], int] = lambda _: 0, is_written: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., int]]:
    """Give a command the flag --json, and print what its function returns, if anything. `is_written`: to files, too."""

    def decorated(function: Callable[..., Any]) -> Callable[..., int]:
        @functools.wraps(function)
        def command(as_json: bool, **values: Any) -> int:
            report = function(**values)
            if is_written and report is not None:
                _print_written(_print, report, as_json, print_text)
            elif report is not None:
                _print(report, as_json, print_text)
            return exit_code(report)

        return _json(command)

    return decorated


def _print_versions(context: click.Context, option: click.Parameter, is_given: bool) -> None:
    """Print the version of Recmill and of the packages that matter, from their metadata: torch is not imported."""
    if is_given:
        from recmill.observe.provenance import versions

        for name, version in versions().items():
            print(name, version)
        context.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(_DEBUG, is_flag=True, help="Show tracebacks; accepted anywhere on the command line.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_versions, help="Show versions."
)
@click.pass_context
def commands(context: click.Context, debug: bool) -> None:
    """Train recommenders with very large embedding tables, from a laptop to a cluster."""
    from recmill.observe.log import set_up_console

    if context.invoked_subcommand != "train":  # which has nothing to clean up
        restore_default_signals()
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ResourceError("The current directory was deleted. Change to one that exists.") from None
    set_up_console()


commands.add_command(_Datasets("prepare", help="Make a prepared dataset."))


@commands.command("download", cls=Command)
@click.argument("name", metavar="{movielens|goodreads|criteo}")
@click.option("--output", required=True, type=click.Path(), help="Directory to write to: VARIANT/ or a file.")
def download_command(name: str, output: str, **options: Any) -> None:
    """Download public raw data and verify it: MovieLens, Goodreads or Criteo's 1TB logs. Mind their terms of use."""
    _print_written(print, recmill.download(name, output, **options))


@commands.command("split", cls=Command)
@click.option("--input", required=True, type=click.Path(), help="One raw log: plain, .gz or .zst.")
@click.option("--output", required=True, type=click.Path(), help="Directory to write; it appears when it is complete.")
def split_command(input: str, output: str, **options: Any) -> None:
    """Split one raw log into parts, to be prepared like the days of a large one."""
    recmill.split(input, output, **options)


@commands.command("adopt", cls=Command)
@click.argument("directory", type=click.Path())
def adopt_command(directory: str, **options: Any) -> None:
    """Describe the npy or bin files of TorchRec's or MLPerf's scripts in DIRECTORY as a prepared dataset."""
    _print_written(printed.print_dataset, recmill.adopt(directory, **options))


@commands.command("audit", cls=Command)
@click.argument("dataset", type=click.Path())
@_json
def audit_command(dataset: str, as_json: bool, **options: Any) -> int:
    """Report what in the click log DATASET would make results wrong. Exits with 3 if anything would, otherwise 0."""
    report = recmill.audit(dataset, **options)
    _print({**asdict(report), "failures": report.num_failures}, as_json, lambda _: printed.print_audit(report))
    return 3 if report.num_failures else 0


@commands.command("train", cls=Command)
@click.argument("config", type=click.Path())
def train_command(config: str, run: str, **options: Any) -> None:
    """Train the model of CONFIG (a TOML file, or a name that `recmill configs list` shows) and test it.

    Exits with 0 when training is complete. When it is stopped by a signal, it saves and exits with 75 (SIGTERM,
    SIGUSR1, SIGUSR2) or 130 (Ctrl-C).
    """
    import polars  # noqa: F401 - for the summary: it takes 0.1 s, now while the worker imports torch

    recmill.train(config, run, **options)
    _print_trained(run)


def _print_trained(run: str) -> None:
    from recmill.commands.results import next_command, run_report

    if process_environment().rank == 0:
        _print_written(printed_runs.print_summary, run_report(run), next_command(run))


@commands.command("plan", cls=Command)
@click.argument("config", required=False, type=click.Path())
@click.option(
    "--calibrate",
    type=click.Path(),
    metavar="FILE",
    help="Measure this machine instead, and write a file for --device.",
)
@click.option("--details", is_flag=True, help="Print all tables, and the facts about the device as well.")
@_json
def plan_command(config: str | None, calibrate: str | None, details: bool, as_json: bool, **options: Any) -> int:
    """Plan a run of CONFIG for given machines: memory, speed, time. Exits with 5 if the tables do not fit."""
    from recmill.commands.calibrate import calibrate_machine

    if (config is None) == (calibrate is None):
        raise click.UsageError("Give either CONFIG or --calibrate FILE.")
    if calibrate is not None:
        device = calibrate_machine(calibrate)
        _print_written(_print, device.model_dump(), as_json, lambda _: printed_plan.print_device(device))
        return 0
    assert config is not None
    report = recmill.plan(config, **options)
    _print(report.as_dict(), as_json, lambda _: printed_plan.print_plan(report, details))
    return 0 if report.fits else 5


@commands.command("launch", cls=Command)
@click.argument("config", type=click.Path())
def launch_command(config: str, run: str, dry_run: bool, **options: Any) -> None:
    """Check a run of CONFIG, then start it with Slurm, PBS, Kubernetes, MPI, torchrun, torchx or on this machine."""
    from recmill.commands.launch import launch, start

    launched = launch(config, run, dry_run=dry_run, **options)
    _print_written(printed.print_launch, launched, dry_run)
    if not dry_run:
        start(launched)


@commands.command("run-like", cls=Command)
@click.argument("program")
@click.argument("arguments", metavar="-- ARGUMENTS...", nargs=-1, type=click.UNPROCESSED)
def run_like_command(program: str, arguments: tuple[str, ...], run: str | None, procs: int, show: bool) -> None:
    """Run a command line of TorchRec's, MLPerf's or other scripts, for example PROGRAM = dlrm_main.py.

    docs/coming-from.md lists all programs and what becomes of their flags. Their defaults apply, not Recmill's.
    """
    from recmill.commands.run_like import plan_like, run_like

    plan = plan_like(program, arguments, run, procs)
    if show:
        print(plan.as_script())
        return
    run_like(plan)
    if trained := plan.steps[-1].arguments.get("run"):
        _print_trained(trained)


@commands.command("status")
@click.argument("run", type=click.Path())
@_prints(printed.print_status)
def status_command(run: str) -> Any:
    """Show the state of RUN and of its job: queued, running, done, preempted, interrupted, failed or lost."""
    from recmill.commands.jobs import status

    return status(run)


@commands.command("logs")
@click.argument("run", type=click.Path())
@click.option(
    "--rank", type=click.IntRange(min=0), help="Print the log of this rank.  [default: the output of the job]"
)
@click.option("--follow", is_flag=True, help="Print new lines until the run ends.")
def logs_command(run: str, rank: int | None, follow: bool) -> None:
    """Print the output of RUN's newest job, or the log of a rank."""
    from recmill.commands.jobs import logs

    for text in logs(run, rank=rank, follow=follow):
        print(text, end="", flush=True)


@commands.command("cancel")
@click.argument("run", type=click.Path())
@click.option("--now", is_flag=True, help="Stop at once; what was not saved is lost.")
def cancel_command(run: str, now: bool) -> None:
    """Stop RUN's jobs after they have saved, and do not requeue them."""
    from recmill.commands.jobs import cancel

    printed.print_cancelled(cancel(run, now=now))


@commands.command("evaluate", cls=Command)
@click.argument("run", type=click.Path())
@_json
def evaluate_command(run: str, split: Any, as_json: bool, **options: Any) -> None:
    """Evaluate the newest or best checkpoint of RUN; sequence models are compared with ranking by popularity."""
    from recmill.commands.results import best_of_run

    values = recmill.evaluate(run, split=split, **options)
    if process_environment().rank == 0:
        _print(values, as_json, lambda values: printed.print_values(split, values, best_of_run(run, split)))


@commands.command("recommend", cls=Command)
@click.argument("run", type=click.Path())
@_json
def recommend_command(
    run: str,
    history: str | None,
    users: str | None,
    is_for_all: bool,
    input: str | None,
    output: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Recommend the K items that RUN's model ranks first: after histories, for users or for requests."""
    if (history is not None) + (users is not None) + (input is not None) + is_for_all != 1:
        raise click.UsageError("Give exactly one of --history, --users, --all and --input.")
    if (is_for_all or input is not None) != (output is not None):
        raise click.UsageError("--all and --input write to a file, which --output names; the others print.")
    if output is not None:
        written = recmill.recommend_all(run, output, input=input, **options)
        if output != "-":
            _print_written(_print, written, as_json, printed.print_written_recommendations)
    else:
        _print(recmill.recommend(run, history, users=users, **options), as_json, printed.print_recommendations)


@commands.command("schema", cls=Command)
@_prints(printed.print_schema)
def schema_command(input: str, **options: Any) -> Any:
    """Guess what the columns of a click log are, and write a schema to edit, for `recmill prepare clicks`."""
    return recmill.guess_schema(input, **options)


@commands.command("predict", cls=Command)
@click.argument("run", type=click.Path())
@_prints(printed.print_predictions, is_written=True)
def predict_command(run: str, input: str, output: str, **options: Any) -> Any:
    """Score new rows: the probability of a click for each row of --input, by RUN's click model.

    A sequence model scores the items in column 'candidates' after those in column 'history'.
    """
    written = recmill.predict(run, input, output, **options)
    return None if output == "-" else written


@commands.command("tune", cls=Command)
@click.argument("config", type=click.Path())
@_prints(printed.print_study, lambda found: int(found["best"] is None), is_written=True)
def tune_command(config: str, space: str, output: str, **options: Any) -> Any:
    """Search for better values of keys of CONFIG, by validation alone. Exits with 1 if no trial was completed."""
    return recmill.tune(config, space, output, **options)


@commands.command("explain", cls=Command)
@click.argument("run", type=click.Path())
@_prints(printed.print_explanation)
def explain_command(run: str, group: tuple[str, ...], **options: Any) -> Any:
    """Show what RUN's model relies on: its features, by the AUROC that is lost when one is shuffled, or a history."""
    from recmill.commands.explain import explanation

    return explanation(run, group=[*group], **options)


@commands.command("items", cls=Command)
@click.argument("run", type=click.Path())
@_prints(printed.print_items, is_written=True)
def items_command(run: str, output: str, **options: Any) -> Any:
    """Write the vectors of all items, or of the requests in a file, by RUN's two-tower model."""
    return recmill.write_items(run, output, **options)


checkpoint_group = click.Group(
    "checkpoint", help="List, verify or inspect the checkpoints of a run, or read or write a table's rows."
)
commands.add_command(checkpoint_group)


@checkpoint_group.command("list")
@click.argument("run", type=click.Path())
@_prints(printed.print_checkpoints)
def checkpoint_list_command(run: str) -> Any:
    """List steps, kinds and sizes of RUN's checkpoints; checks the names and sizes of their files."""
    from recmill.commands.checkpoint import list_checkpoints

    return list_checkpoints(run)


@checkpoint_group.command("verify")
@click.argument("run", type=click.Path())
@_prints(printed.print_checkpoints, lambda found: 4 if any(one["health"] != "complete" for one in found) else 0)
def checkpoint_verify_command(run: str) -> Any:
    """Read every byte of RUN's checkpoints and compare digests. Exits with 4 if any is corrupt, otherwise 0."""
    from recmill.commands.checkpoint import list_checkpoints

    return list_checkpoints(run, digests=True)


@checkpoint_group.command("inspect")
@click.argument("run", type=click.Path())
@click.option("--step", type=int, help="Step of the checkpoint.  [default: the newest]")
@_prints(printed.print_checkpoint)
def checkpoint_inspect_command(run: str, step: int | None) -> Any:
    """Show state and tensors of one of RUN's checkpoints: tables with their optimizer state, and layers."""
    from recmill.commands.checkpoint import inspect_checkpoint

    return inspect_checkpoint(run, step=step)


@checkpoint_group.command("rows")
@click.argument("run", type=click.Path())
@click.argument("table")
@click.option("--output", required=True, type=click.Path(), help="Parquet file to write.")
@click.option("--step", type=int, help="Step of the checkpoint.  [default: the newest]")
@_prints(printed.print_exported_rows, is_written=True)
def checkpoint_rows_command(run: str, table: str, output: str, step: int | None) -> Any:
    """Write the rows of a TABLE of RUN to a Parquet file, by id, with their optimizer state."""
    return recmill.export_rows(run, table, output, step=step)


@checkpoint_group.command("write-rows")
@click.argument("run", type=click.Path())
@click.argument("table")
@click.option("--input", "file", required=True, type=click.Path(), help="Parquet file as written by `checkpoint rows`.")
@click.option("--output", required=True, type=click.Path(), help="Run directory to create.")
@click.option("--step", type=int, help="Step of the checkpoint.  [default: the newest]")
@_prints(printed.print_imported_rows, is_written=True)
def checkpoint_write_rows_command(run: str, table: str, file: str, output: str, step: int | None) -> Any:
    """Copy a checkpoint of RUN to a new run, with rows of TABLE replaced by those of a Parquet file."""
    return recmill.import_rows(run, table, file, output, step=step)


@commands.command("results")
@click.argument("runs", nargs=-1, required=True, type=click.Path())
@_json
def results_command(runs: tuple[str, ...], as_json: bool) -> None:
    """Compare RUNS: state, best step, test metrics and the difference to the first run on the same data."""
    from recmill.commands.results import deltas, run_report

    reports = [run_report(run) for run in runs]
    differences = deltas(reports)
    facts = [asdict(report) | {"delta": delta} for report, delta in zip(reports, differences, strict=True)]
    _print(facts, as_json, lambda _: printed_runs.print_results(reports, differences))


configs_group = click.Group("configs", help="List, show or copy the configs that come with Recmill.")
commands.add_command(configs_group)


def _matching_configs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names that a shell offers to complete."""
    from recmill.config.shipped import shipped_configs

    return [name for name in shipped_configs() if name.startswith(incomplete)]


@configs_group.command("list")
@_prints(lambda found: printed.print_table(["config", "what it is"], [*found.items()]))
def configs_list_command() -> Any:
    """List the configs for `recmill train` and, under clusters/, the profiles for `recmill launch`."""
    from recmill.commands.configs import list_configs

    return list_configs()


@configs_group.command("show")
@click.argument("name", shell_complete=_matching_configs)
def configs_show_command(name: str) -> None:
    """Print the config NAME."""
    from recmill.commands.configs import show_config

    print(show_config(name), end="")


@configs_group.command("copy")
@click.argument("name", shell_complete=_matching_configs)
@click.argument("destination", type=click.Path(), default=".")
def configs_copy_command(name: str, destination: str) -> None:
    """Copy the config NAME to DESTINATION: a new file, or a directory.  [default: the current directory]"""
    from recmill.commands.configs import copy_config

    print(copy_config(name, destination))


@commands.command("check-plugin", cls=Command)
@click.argument("name")
@_prints(printed.print_outcomes, lambda outcomes: int(any(outcome.problem for outcome in outcomes)))
def check_plugin_command(name: str, **options: Any) -> Any:
    """Check that NAME, a module like my_package.fm, works as a model, dataset or metric of Recmill.

    Exits with 0 if every check passes, otherwise 1.
    """
    from recmill.commands.check_plugin import check_plugin

    return check_plugin(name, **options)


@commands.command("trace", cls=Command)
@click.argument("run", required=False, type=click.Path())
@_prints(printed.print_timeline, is_written=True)
def trace_command(run: str | None, **options: Any) -> Any:
    """Merge what the processes of RUN did into one timeline, RUN/trace.json.gz, for https://ui.perfetto.dev."""
    from recmill.commands.trace import trace

    return trace(run, **options)


@commands.command("export-metrics", cls=Command)
@click.argument("run", type=click.Path())
def export_metrics_command(run: str, **options: Any) -> None:
    """Write the metrics of RUN as a CSV file, or for TensorBoard, Weights & Biases (offline) or MLflow (SQLite)."""
    from recmill.commands.export_metrics import export_metrics

    _print_written(print, export_metrics(run, **options))


@commands.command("doctor")
@click.option("--store", type=click.Path(), help="Measure the disk of this directory instead, for cached tables.")
def doctor_command(store: str | None) -> int:
    """Check the installation and say how to fix it. Exits with 0 if training would work, otherwise 5."""
    from recmill.commands.doctor import check_store, doctor, would_work

    checks = check_store(store) if store is not None else doctor()
    printed.print_checks(checks, would_work(checks))
    return 0 if would_work(checks) else 5


@commands.command("plot", cls=Command)
@click.argument("runs", nargs=-1, required=True, type=click.Path())
def plot_command(runs: tuple[str, ...], **options: Any) -> None:
    """Draw the learning curves of RUNS: training loss and validation metrics by step or epoch."""
    _print_written(print, recmill.plot(*runs, **options))


@commands.command("report", cls=Command)
@click.argument("runs", nargs=-1, required=True, type=click.Path())
def report_command(runs: tuple[str, ...], **options: Any) -> None:
    """Write one HTML file about RUNS: curves, where the time went, machine, tables, config, how to reproduce it."""
    _print_written(print, recmill.report(*runs, **options))


@commands.command("compare")
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@_prints(printed_runs.print_comparison)
def compare_command(a: str, b: str) -> Any:
    """Compare run A with run B: config, environment, metrics, speed, curves, and which differences are noise."""
    return recmill.compare(a, b)
