"""`recmill train`: config + prepared dataset -> a run directory. An interrupted run resumes from its checkpoint."""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from recmill import registry
from recmill.checkpoints.format import committed, step_path, verify
from recmill.commands import assemble
from recmill.commands.history import number
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Fallback, Procs, Verify, dataset_checks, flag
from recmill.config import Config, Overrides, differences, fingerprint, key_of, load_config, override_texts, to_toml
from recmill.config.options import given_path
from recmill.config.sections import Section, Settings, ShardingSection, TrainSection
from recmill.config.suggested import own_config
from recmill.data.opening import Checks
from recmill.data.recipes import features_with_other_ids, keep_recipe
from recmill.environment import (
    config_variables,
    job_id,
    meeting_host,
    own_node,
    process_environment,
    recorded_variables,
)
from recmill.errors import CheckpointError, ConfigError, DataError, Interrupted, Preempted, UserError
from recmill.failpoints import reach
from recmill.files.atomic import write_json, write_text
from recmill.hardware.cpu import threads_per_process
from recmill.hardware.precision import probe, worker_environment
from recmill.launch.dftracer import files_log, recorded_files
from recmill.launch.local import is_launched_with, run_job
from recmill.launch.signals import StopRequest, shown, stop_error, stop_on, stop_with_parent
from recmill.launch.watchdog import Hang, Heartbeat, Watch, watching
from recmill.metrics.binary import Values
from recmill.metrics.own import Metrics
from recmill.observe.printed import counted, table_lines, validation_text
from recmill.observe.progress import CONSOLE, human_bytes
from recmill.observe.provenance import by_host, environment, gpu_report, host_facts, versions
from recmill.observe.run_dir import RunDirectory, State
from recmill.protocols import BatchSource
from recmill.schema import Dataset
from recmill.tables.libraries import import_libraries
from recmill.tables.spec import VALUE_BYTES, TableSpec

if TYPE_CHECKING:
    from recmill.checkpoints.format import Checkpoint, Position
    from recmill.training.parts import Parts
    from recmill.training.schedule import RunSteps
    from recmill.world import World

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1


class Options(Section):
    # --run-dir as well, because torchrun takes '--run' for its own '--run-path'
    run: str = flag(..., "Run directory; an interrupted run resumes from its newest checkpoint.", "--run", "--run-dir")
    procs: Procs = 1
    overrides: list[str] = flag([], "Change a config key, like optim.dense.lr=0.02.", "--set", metavar="KEY=VALUE")
    init_from: str | None = flag(
        None, "A new run starts from the newest checkpoint of RUN, or from RUN@best or RUN@STEP.", metavar="RUN"
    )
    allow_partial: bool = flag(False, "With --init-from: take the tables and layers that have the same size.")
    fallback: Fallback = False
    profile: bool = flag(False, "Record steps 51 to 60 with torch's profiler: observe.profile_steps=[50, 60].")
    verify: Verify = None


@checked_keywords
def train(
    config: str | Path | Mapping[str, Any],
    run: str | Path,
    *,
    procs: int = 1,
    overrides: Overrides = (),
    verify: bool | None = None,
    init_from: str | Path | None = None,
    allow_partial: bool = False,
    fallback: bool = False,
    profile: bool = False,
) -> dict[str, Metrics]:
    """Train and return the final metrics by split: {"val": {...}, "test": {"auroc": ..., "step": 80, ...}}.

    "step" and "checkpoint" name what was tested: with checkpoint.keep_best the best by validation, otherwise the last.
    A run that a signal stops raises `recmill.errors.Preempted` or, on Ctrl-C, `Interrupted`.
    `config`: a TOML file, the name of a shipped config, or a mapping. `overrides`: {"optim.dense.lr": 0.02}, also
    nested, or ["optim.dense.lr=0.02"]. `procs`: processes on this machine (under torchrun: those that torchrun
    started). `verify`: read every byte of the dataset first, or none; by default those of files that are not known to
    be correct. A new run starts from the newest checkpoint of the run `init_from` (or "RUN@best", "RUN@STEP"), with
    `allow_partial` from those tensors that have the same size. `fallback`: if the newest checkpoint is corrupt, resume
    from the newest that is not. `profile`: record steps 51 to 60 with torch's profiler.
    """
    variables = config_variables()
    profiled = ["observe.profile_steps=[50, 60]"] if profile else []
    checked = load_config(config, [*override_texts(overrides), *profiled], variables)
    if allow_partial and init_from is None:
        raise ConfigError("--allow-partial goes with --init-from RUN: it says what to do where that run differs.")
    if process_environment().rank == 0:
        log.info("training %s on %s, in %s", checked.model_name, checked.settings.data.path, run)
        if variables:
            log.info("config keys from the environment: %s", ", ".join(f"{key_of(v)} ({v})" for v in variables))
    checked, directory, dataset, is_finished = check_run(checked, run, dataset_checks(verify))
    if init_from is not None:
        other, which = assemble.open_start(init_from)
        init_from = f"{other.path.absolute()}@{which}"
        _check_start(directory, other.path.absolute(), dataset)
    if is_finished:
        log.info("%s is finished: nothing to do", directory.path)
        results = {split: values for split, values in directory.read_results().items() if split != "timing"}
    else:
        options = Options(run=str(directory.path), init_from=init_from, allow_partial=allow_partial, fallback=fallback)
        results = _launch(checked, dataset, options, procs)
    if stopped := results.get("stopped"):
        step, rank, name = stopped["step"], stopped["rank"], stopped["signal"]
        raise stop_error(name, f"Training ended at step {step:,}{_by(name, rank)}.")
    return {split: Metrics(values) for split, values in results.items()}


class CheckedRun(NamedTuple):
    config: Config
    directory: RunDirectory
    dataset: Dataset
    is_finished: bool


def check_run(config: Config, run: str | Path, checks: Checks) -> CheckedRun:
    """Check the dataset, and that the run directory is new or holds the same run; make the data path absolute."""
    checked = with_absolute_path(config)
    directory = RunDirectory(given_path(run, "--run").absolute())
    saved = _saved_config(directory)
    if saved is not None and (changed := differences(saved, checked)):
        if (theirs := _model_and_data(saved)) != (ours := _model_and_data(checked)):
            raise ConfigError(f"{directory.path} is a run of {theirs}, not of {ours}. Choose another --run.")
        facts = "\n  ".join([f"{directory.path} was started with another config:", *changed])
        raise ConfigError(
            f"{facts}\nTo train with these settings: another --run; to start it from this run's weights: --init-from "
            f"{directory.path} as well.\nTo resume this run, use its own config.toml. "
            "Keys that may change are listed at the end of docs/configs.md."
        )
    if saved is not None and (most := checked.settings.train.max_steps):
        step = directory.saved_step()
        if step_path(directory.checkpoints, step).is_dir():  # else training may begin at an earlier one
            _check_reached(directory, step, most)
    if not Path(config.settings.data.path).exists():
        raise _no_data(config, saved)
    dataset = assemble.open_matching_dataset(checked, checks)
    if saved is not None:
        newest = None
        with contextlib.suppress(CheckpointError):  # a corrupt one is an error later, unless there is --fallback
            newest = verify(committed(directory.checkpoints)[-1], digests=False)
        if newest:
            assemble.check_same_run(newest, checked, dataset)
    is_finished = saved == checked and _is_finished(directory, dataset)
    if saved and not is_finished and checked.settings.observe.mlperf and not directory.mlperf_log.is_file():
        raise ConfigError(
            f"{directory.mlperf_log} is missing, so observe.mlperf cannot log the first steps of this run. "
            "Set it to false, or choose another --run."
        )
    return CheckedRun(checked, directory, dataset, is_finished)


def _check_start(directory: RunDirectory, given: Path, dataset: Dataset) -> None:
    """Raise unless the run started from the run `given`, or is new and ids stand for the same values in both."""
    if not committed(directory.checkpoints):
        trained_on = Path(load_config(RunDirectory(given).config_file).settings.data.path)
        if features := features_with_other_ids(given, trained_on, dataset):
            names = ", ".join(features)
            remedy = "Train on the old and the new rows together, or prepare click logs with ids = 'hash'."
            if dataset.description.kind == "histories":
                names = "items"
                remedy = (
                    "Prepare the old and the new interactions together (recmill prepare histories --input OLD,NEW ...) "
                    "and train a new run on them; or carry the item vectors over by the items' ids, beginning with "
                    f"`recmill checkpoint rows {given} item --output item.parquet`: docs/training.md, Sequence "
                    "models on newer data."
                )
            fact = f"the ids of {names} stand for other values in {dataset.path} than in that run"
            raise ConfigError(f"--init-from {given}: {fact}. {remedy}")
        return
    started = directory.started_from()
    if started is None:
        return
    run = str(started.get("run", ""))
    if run and Path(run).resolve() == given.resolve():
        return
    begun = f"from {run}" if run else "without --init-from"
    raise ConfigError(
        f"{directory.path} was started {begun}, so it cannot start from {given}. Choose another --run; or give the "
        "same --init-from as before, or none, to resume this one."
    )


def _no_data(config: Config, saved: Config | None) -> DataError:
    """Return the error for a missing data.path; it names the dataset of the run, or one beside the path."""
    path = Path(config.settings.data.path)
    if saved:
        known = [Path(saved.settings.data.path)]
    else:
        kind = "own/sasrec" if assemble.model_module(config).KIND == "histories" else "own/dlrm"
        prepared = (file.parent for file in sorted(path.parent.glob("*/dataset.json")))
        beside = [dataset for dataset in prepared if own_config(dataset) == kind]
        near = registry.nearest(path.name, [dataset.name for dataset in beside])
        known = [dataset for dataset in beside if dataset.name in near] or beside
    yours = next(filter(Path.is_dir, known), "DIR")
    return DataError(
        f"{path}: no such directory, and it is the data.path of the config. Name your dataset: --set data.path={yours}"
        f"; or prepare it: recmill prepare NAME --output {path}."
    )


def _model_and_data(config: Config) -> str:
    return f"{config.model_name} on {config.settings.data.path}"


def _by(name: str, rank: int) -> str:
    return "" if name == "SIGINT" else f" by {name} on rank {rank}"  # a user knows about Ctrl-C


def _launch(config: Config, dataset: Dataset, options: Options, procs: int) -> dict[str, Any]:
    """Train in this process, if a launcher started it, or in `procs` new ones."""
    section = config.settings.train
    wait_seconds = 3 * section.hang_seconds  # a hang is reported with its stacks before a collective times out
    if is_launched_with(procs):
        stop_with_parent()
        import_libraries(in_own_process=True)
        from recmill.world import joined_world

        # Until all processes are there, a signal ends this one at once: there is nothing to save.
        with (
            joined_world(section.device, section.join_seconds, wait_seconds) as world,
            stop_on(section.stop_signals) as stop,
        ):
            return _train_watched(world, config, options, stop, dataset)
    run = RunDirectory(options.run)
    run.path.mkdir(parents=True, exist_ok=True)
    arguments = {
        "config": config.as_dict(),
        "options": options.model_dump(),
        "device": section.device,
        "join_seconds": section.join_seconds,
        "wait_seconds": wait_seconds,
        "stop_signals": section.stop_signals,
    }
    try:
        return run_job("train", arguments, procs, section.max_restarts, _precision_environment(section, procs))
    except UserError as error:
        # The launcher knows the cause where rank 0 saw only a consequence.
        if run.path.is_dir() and own_node().rank == 0:  # unless somebody removed it
            with contextlib.suppress(UserError, OSError), run.locked():  # unless another process holds the lock
                _write_end(run, error)
        raise


def _precision_environment(section: TrainSection, procs: int) -> dict[str, str]:
    """Return the variables that workers must be started with to use train.precision on this CPU."""
    if section.precision == "float32" or section.device == "cuda":
        return {}
    return worker_environment(probe(section.precision, threads_per_process(procs)))


def work(world: "World", config: dict[str, Any], options: dict[str, Any], stop: StopRequest) -> dict[str, Any]:
    """Train in one of the launcher's processes."""
    return _train_watched(world, load_config(config), Options(**options), stop)


def _train_watched(
    world: "World", config: Config, options: Options, stop: StopRequest, dataset: Dataset | None = None
) -> dict[str, Any]:
    """Train with the run directory locked and a watchdog; write to status.json how it ends."""
    run = RunDirectory(options.run)
    reach("train.begin")

    def on_hang(hang: Hang) -> None:
        log.error("%s; see hang-rank-%d.txt", hang.with_silent_ranks, hang.rank)
        if world.is_main:
            _write_end(run, UserError(f"Hung: {hang.with_silent_ranks}."))

    heartbeat = Heartbeat()
    seconds = config.settings.train.hang_seconds
    watch = Watch(world.rank, seconds, run.path, process_environment().job, world.silent_ranks)
    with run.locked() if world.is_main else contextlib.nullcontext():
        try:
            with watching(heartbeat, watch, on_hang), contextlib.ExitStack() as recording:
                return _train(world, config, run, options, dataset, stop, heartbeat, recording)
        except BaseException as error:
            error = world.explained(error)
            if isinstance(error, KeyboardInterrupt) and stop.signal:
                error = stop_error(stop.signal, f"Ended at once by a signal after {shown(stop.signal)}.")
            if world.is_main:
                _write_end(run, error)
            raise error


def _train(
    world: "World",
    config: Config,
    run: RunDirectory,
    options: Options,
    dataset: Dataset | None,
    stop: StopRequest,
    heartbeat: Heartbeat,
    recording: contextlib.ExitStack,
) -> dict[str, Any]:
    """Train from an empty or interrupted run directory to its results, or to {"stopped": ...}. All ranks take part."""
    from recmill.checkpoints.format import Origin, Position
    from recmill.checkpoints.loading import find_checkpoint, load
    from recmill.checkpoints.saver import Saver
    from recmill.kernels.library import load_library
    from recmill.observe import clocks
    from recmill.observe.log import log_to_file
    from recmill.observe.recorder import Recorder, unix_ns
    from recmill.tables.first_values import fill_tables, zero_padding
    from recmill.tables.placement import as_rows, placements
    from recmill.training import advice
    from recmill.training.evaluate import evaluate_split
    from recmill.training.loop import Sections, early_end, fit
    from recmill.training.mlperf import MlperfLog, mlperf_facts
    from recmill.training.optim import build_optimizer
    from recmill.training.parts import Parts
    from recmill.training.precision import set_tf32
    from recmill.training.schedule import plateau_patience, run_steps

    # Build the parts
    heartbeat.beat("starting")
    recorder = Recorder()
    settings = config.settings
    compiling = threading.Thread(target=load_library, daemon=True)
    if world.device.type == "cpu" and settings.train.kernels == "auto":
        compiling.start()  # at first use, while the rest is built
    world.broadcast(None)  # rank 0 holds the lock: now the others may log
    log_to_file(run.path, world.rank)
    set_tf32(settings.train)
    dataset = dataset or assemble.open_matching_dataset(config)
    source = assemble.build_source(config, dataset, world.rank, world.size)
    steps = run_steps(settings, source.batches_per_epoch)
    tables = assemble.table_specs(config, dataset)
    _wait_for_kernels(compiling, stop, heartbeat)
    model = assemble.build_sharded(config, dataset, world, run.path)
    optimizer = build_optimizer(model, settings.optim)
    parts = Parts(model, assemble.task_module(config), source, world, settings.data.prefetch, heartbeat, recorder)
    placed = placements(model.plan, tables, settings.optim.tables.name, model.cache_bytes, model.stores)
    if world.is_main:
        _log_facts(parts, config, dataset, tables, steps)
        all_tables, largest = ("\n".join(table_lines(as_rows(placed, world.size, n))) for n in (None, 5))
        log.info("%s", all_tables, extra={"console": largest})
        _log_stores(model, config, world)

    # Find the checkpoint to start from
    heartbeat.beat("loading")
    origin = Origin(
        config=fingerprint(config),
        dataset=dataset.fingerprint,
        seed=settings.train.seed,
        global_batch_size=settings.train.global_batch_size,
        world_size=world.size,
        versions=versions(),
    )
    beat = partial(heartbeat.beat, "reading a checkpoint")
    find = partial(find_checkpoint, world=world, fallback=options.fallback, on_block=beat)
    found = find(run.checkpoints, "newest", set_aside_newer=True, saved_step=run.saved_step())
    position = found.position if found else Position()
    if found:
        assemble.check_same_run(found, config, dataset)
        _check_position(found, source.batches_per_epoch)
    hold = contextlib.ExitStack()  # the other run may be training, and must not prune what is loaded below
    earlier = None
    if options.init_from and not found:
        path, _, which = options.init_from.rpartition("@")
        other = RunDirectory(path)
        earlier = find(other.checkpoints, which, saved_step=other.saved_step(), hold=hold)
        if earlier is None:
            raise CheckpointError(f"{path}: the checkpoint {which} is no longer there. Name another after --init-from.")
    _check_steps(steps.total, position, config, run, dataset)

    # Describe the run in its directory, and load or initialize the model
    started = time.monotonic()
    hosts = world.gather(_host_facts(world, dataset, run))
    if world.is_main:
        warnings = [*advice.before_training(settings, steps)]
        if found:
            started -= run.trained_seconds()
        if found and run.config_file.is_file():
            before = run_steps(load_config(run.config_file).settings, source.batches_per_epoch)
            warnings += advice.on_resume(settings.optim, before, steps, position.step)
        for text in warnings:
            log.warning("%s", text)
        run.write_status("running", step=position.step)  # first: this file makes the directory a run directory
        write_text(run.config_file, to_toml(config))
        keep_recipe(dataset, run.path)
        facts = environment(world.size, str(world.device))
        facts |= {"launcher": process_environment().started_by or None, "job_id": job_id()}
        facts |= {"hosts": by_host(hosts or []), "variables": recorded_variables()}
        sent = settings.sharding if world.size > 1 else ShardingSection()  # one process sends nothing
        facts["started_from"] = run.started_from() if found else {}
        if earlier:
            facts["started_from"] = {"run": str(other.path), "step": earlier.position.step}
        facts["exchange"] = {"forward": sent.forward_precision, "backward": sent.backward_precision}
        write_json(run.path / "env.json", facts | {"plugins": registry.plugin_files()})
        if report := gpu_report():
            write_text(run.path / "gpu.txt", report)
        write_json(run.path / "sharding.json", [asdict(table) for table in placed])
        run.results_file.unlink(missing_ok=True)
        run.forget_metrics_after(position.step if found else -1)
        if settings.observe.tensorboard:
            run.copy_metrics_to_tensorboard()
    trace = world.broadcast(run.new_trace() if settings.observe.record and world.is_main else None)
    offsets = [clocks.measure(world, meeting_host())] if trace else []
    recorded: dict[str, Any] = {"rank": world.rank, "world_size": world.size, "offsets": offsets}
    recorded["files_log"] = files_log(trace, world.rank)
    recording.enter_context(recorded_files(recorded["files_log"], [dataset.path, run.path]))
    recording.enter_context(recorder.writing(trace, recorded))
    if found:
        load(found, model, optimizer)
        log.info("resuming from step %s: %s", f"{position.step:,}", found.path)
    else:
        fill_tables(model, tables, settings.train.seed)
        if earlier:
            load(earlier, model, optimizer, options.allow_partial)
            zero_padding(model, tables)
            log.info("starting from step %s of another run: %s", f"{earlier.position.step:,}", earlier.path)
    hold.close()
    heartbeat.beat("loaded", position.step)
    reach("train.loaded")

    # Train
    results: dict[str, Values] = {}
    popularity: Any = None  # what ranking by popularity reaches on val, as the first validation measures it
    earlier_values = {
        line["step"]: value
        for line in run.read_metrics()
        if line.get("split") == "val" and (value := number(line.get(str(line.get("headline"))))) is not None
    }
    validation_advice = advice.ValidationAdvice(steps, earlier_values, settings.checkpoint.keep_best)

    def evaluate(split: str, at: Position) -> None:
        nonlocal popularity
        is_test = split == "test"
        resamples = settings.eval.bootstrap if is_test else 0
        metrics = assemble.new_metrics(config, source, is_test or popularity is None, resamples)
        results[split] = evaluate_split(parts, split, metrics)
        if split == "val":
            popularity = results[split].get(f"popularity/{parts.task.headline(results[split])}", popularity)
            results[split] = {name: x for name, x in results[split].items() if not name.startswith("popularity/")}
        if world.is_main:
            if at.step <= position.step:  # a run that is resumed may have the same line already
                run.forget_metrics_of(at.step, split)
            headline = parts.task.headline(results[split])
            facts = {"step": at.step, "epoch": at.epoch, "split": split, "headline": headline}
            run.append_metrics(facts | {"epochs_done": at.step / steps.epoch} | results[split])

    def validate(at: Position) -> Position:
        began = unix_ns()
        evaluate("val", at)
        reached = results["val"][parts.task.headline(results["val"])]
        value = world.broadcast(reached if isinstance(reached, float) else None)
        at = at.after_validation(value, plateau_patience(settings.optim.schedule))
        if mlperf:
            mlperf.validated(at.step, began, value)
        _log_validation(at, results["val"], parts)
        entropy = number(results["val"].get("normalised_entropy"))
        for text in validation_advice.after(at, value, popularity, entropy) if world.is_main else ():
            log.warning("%s", text)
        return at

    def on_commit(step: int) -> None:
        run.write_status("running", step=step, seconds=seconds())

    def seconds() -> float:
        return round(time.monotonic() - started, 1)

    saver = Saver(run.checkpoints, model, optimizer, origin, settings.checkpoint, world, heartbeat, on_commit)
    saver.timed = partial(recorder.span, "write checkpoint", "saving")
    mlperf = MlperfLog(run.mlperf_log, steps.epoch) if settings.observe.mlperf and world.is_main else None
    if mlperf and found:
        mlperf.resume(position.step)
    elif mlperf:
        facts = mlperf_facts(settings, steps, optimizer) | _mlperf_sizes(source, dataset, settings, hosts or [])
        mlperf.begin(recorder.clock[0], facts)
    if settings.eval.before_training and not position.step:
        evaluate("val", position)
        _log_validation(position, results["val"], parts)
    sections = Sections(settings.train, settings.optim, settings.eval, settings.checkpoint, settings.observe, steps)
    try:
        at, signal = fit(parts, optimizer, sections, position, run, saver, stop, validate)
    except UserError:
        if world.size == 1:  # the save under way needs no other rank, and is safe
            with contextlib.suppress(UserError):
                saver.finish()
        raise
    restarts = process_environment().attempt
    timing = _timing(parts, settings)
    if trace:
        offsets.append(clocks.measure(world, meeting_host()))  # for clocks that drift
    if signal:
        if world.is_main:
            log.info("%s", timing["verdict"])
            facts = {"rank": signal.rank, "reason": signal.name, "restarts": restarts, "seconds": seconds()}
            run.write_status(signal.state, step=at.step, **facts)
            text = f"{signal.state} at step {at.step:,}{_by(signal.name, signal.rank)}"
            log.info("%s", text, extra={"console": ""})  # the error says the same
        return {"stopped": {"step": at.step, "rank": signal.rank, "signal": signal.name}}
    if mlperf:
        is_success = not settings.eval.target_auroc or (at.best or 0.0) >= settings.eval.target_auroc
        mlperf.stop(at.step, "success" if is_success else "aborted")
    reach("train.end")
    early = early_end(at, settings.eval, steps.patience)
    end = early or "all steps done"
    if world.is_main:
        extra = {} if early else {"console": ""}  # the summary says the same
        log.info("finished at step %s: %s", f"{at.step:,}", end, extra=extra)

    # Test the best checkpoint, if the run keeps it, or else the last step; write the results
    tested = at
    if settings.checkpoint.keep_best and at.best_step not in (0, at.step):
        with contextlib.ExitStack() as hold_best:
            if best := find(run.checkpoints, "best", hold=hold_best):
                load(best, model)
                tested = best.position
                results["val"] = evaluate_split(parts, "val", assemble.new_metrics(config, source, False))
        if world.is_main and best:
            log.info("testing step %s, the best by validation", f"{tested.step:,}")
        elif world.is_main:
            log.warning(
                f"the best checkpoint, of step {at.best_step:,}, was not kept: testing step {at.step:,}. "
                "It could not be saved, or checkpoint.keep_best was not set yet."
            )
    if settings.eval.test:
        with recorder.span("test"):
            evaluate("test", tested)
    if settings.eval.test and world.is_main:
        _log_values(tested, "test", results["test"], console="")  # the summary at the end shows them
    results = {split: values | assemble.named_in_results(tested.step) for split, values in results.items()}
    if settings.data.multi_hot.collect_frequencies:
        _write_frequencies(run, source, at, world)
    if world.is_main:
        write_json(run.results_file, results | {"timing": timing})
        run.write_status(
            "done",
            step=at.step,
            end=end,
            best_step=at.best_step,
            best=at.best,
            tested_step=tested.step,
            seconds=seconds(),
            restarts=restarts,
            dataset=dataset.fingerprint,
        )
        for text in (timing["verdict"], *timing["notes"]):
            log.info("%s", text, extra={"console": ""})  # the summary shows the verdict
    return results


def _host_facts(world: "World", dataset: Dataset, run: RunDirectory) -> dict[str, Any]:
    facts = host_facts({"dataset": dataset.path, "run": run.path})
    if world.device.type == "cuda":
        import torch

        gpu = torch.cuda.get_device_properties(world.device)
        facts["gpu"] = {"name": gpu.name, "memory_gb": round(gpu.total_memory / 1e9, 1)}
    return facts


def _mlperf_sizes(
    source: BatchSource, dataset: Dataset, settings: Settings, hosts: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return for MLPerf how many samples an epoch and a validation have, and which machines train."""
    rows = sum(part.stop - part.start for part in dataset.clicks.splits["val"])
    limit = settings.data.limit_val_batches * settings.eval.global_batch_size
    machines = Counter(host["cpu"] for host in by_host(hosts))
    return {
        "submission_platform": ", ".join(f"{count} x {cpu}" for cpu, count in machines.items()),
        "train_samples": source.samples_per_epoch,
        "eval_samples": min(rows, limit) if limit else rows,
    }


def _timing(parts: "Parts", settings: Settings) -> dict[str, Any]:
    """Return what limits the speed of the run and how its time was spent; empty on other ranks than 0."""
    from recmill.observe.recorder import PARTS
    from recmill.observe.verdict import Hints, RankTimes, verdict

    recorder, world = parts.recorder, parts.world
    spent = {part: nanoseconds / 1e9 for part, nanoseconds in zip(PARTS, recorder.sums, strict=True)}
    own = RankTimes(world.rank, socket.gethostname(), recorder.steps, spent, recorder.counted)
    ranks = world.gather(own)
    hints = Hints(settings.data.prefetch, settings.checkpoint.background)
    return verdict(ranks, hints).as_dict() if ranks else {}


def _wait_for_kernels(compiling: threading.Thread, stop: StopRequest, heartbeat: Heartbeat) -> None:
    """Wait for the thread that compiles kernels, unless a stop is requested: there is nothing to save yet."""
    while compiling.is_alive():
        if stop.signal:
            raise stop_error(stop.signal, f"{shown(stop.signal)} was received before training had started.")
        heartbeat.beat("compiling CPU kernels")
        compiling.join(_POLL_SECONDS)


def _check_position(found: "Checkpoint", batches_per_epoch: int) -> None:
    at = found.position
    if at.batch >= batches_per_epoch or at.step != at.epoch * batches_per_epoch + at.batch:
        raise CheckpointError(
            f"{found.path / 'state.json'}: step {at.step:,} is not at batch {at.batch:,} of epoch {at.epoch:,}, as an "
            f"epoch has {batches_per_epoch:,} batches. Restore it from an intact copy, or choose another --run."
        )


def _check_steps(num_steps: int, position: "Position", config: Config, run: RunDirectory, dataset: Dataset) -> None:
    if not num_steps:
        raise ConfigError(
            f"{dataset.path} has fewer rows for training than one train.global_batch_size of "
            f"{config.settings.train.global_batch_size:,}, and data.drop_last leaves them out. Change one of the two."
        )
    _check_reached(run, position.step, num_steps)


def _check_reached(run: RunDirectory, step: int, num_steps: int) -> None:
    if step > num_steps:
        raise ConfigError(
            f"{run.path} is already at step {step:,}, beyond the {num_steps:,} of train.num_epochs and "
            "train.max_steps. Raise them, or choose another --run."
        )


def _log_facts(parts: "Parts", config: Config, dataset: Dataset, tables: list[TableSpec], steps: "RunSteps") -> None:
    from recmill.data.histories import HistorySource

    source, world = parts.source, parts.world
    train = config.settings.train
    rows = sum(table.rows for table in tables)
    memory = human_bytes(sum(VALUE_BYTES * table.rows * table.dim for table in tables))
    size = f"{counted(len(tables), 'table')} with {counted(rows, 'row')}, {memory}"
    on = f"{counted(world.size, 'process')} on {world.device}"
    log.info(f"{config.model_name} on {dataset.path}: {size}; {on}", extra={"console": f"{size}; {on}"})
    per_epoch = source.batches_per_epoch
    log.info(f"{counted(steps.total, 'step')} of {train.global_batch_size:,} samples; {per_epoch:,} per epoch")
    log.info("%s", steps.described)
    for name, file in registry.plugin_files().items():
        log.info("plug-in %s: %s", name, file)
    if isinstance(source, HistorySource) and per_epoch:
        windows = source.window_facts()
        log.info("%s", windows, extra={"console": windows.split(";")[0]})
    if config.settings.data.train_on_validation:
        log.warning("validation items are trained on: validation metrics measure memorization; use the test metrics")


def _log_validation(at: "Position", values: Values, parts: "Parts") -> None:
    headline = parts.task.headline(values)
    text = validation_text(at.step, values, headline, (at.best_step, at.best), CONSOLE.width)
    if parts.world.is_main:
        _log_values(at, "val", values, console=text)


def _log_values(at: "Position", split: str, values: Values, console: str) -> None:
    shown = (f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items())
    log.info("step %s  %s  %s", f"{at.step:,}", split, "  ".join(shown), extra={"console": console})


def _log_stores(model: Any, config: Config, world: "World") -> None:
    """Say what is kept where, if not all rows are in the device's memory."""
    from recmill.tables.stores.row_cache import RowCache
    from recmill.tables.table_lookup import cached_tables

    if "cached_host_mem" in config.settings.tables.requested_stores().values() and world.device.type == "cpu":
        log.info("tables.store = 'cached_host_mem': on CPU this is device_mem, for the device's memory is the host's")
    for cached in cached_tables(model):
        cache, layout = cached.cache, cached.cache.layout
        if not isinstance(cache, RowCache):
            continue
        log.info(
            f"cached_ssd: {layout.rows:,} rows, {layout.rows * layout.value_bytes / 1e6:,.1f} MB with their state, in "
            f"{cache.file.directory}; {cache.plan.slots:,} of them in a cache of "
            f"{cache.plan.memory_bytes / 1e6:,.1f} MB, {cache.plan.index_bytes / 1e6:,.1f} MB of it for the index; "
            f"read with {cache.engine}{'' if cache.file.is_direct else ', not O_DIRECT: the page cache is used too'}"
        )


def _write_frequencies(run: RunDirectory, source: BatchSource, at: "Position", world: "World") -> None:
    """Write how often each id was trained on, by feature, before and after multi-hot ids were added."""
    import numpy as np

    from recmill.data.clicks import ClickSource

    assert isinstance(source, ClickSource)
    counts = [world.sum_counts(part) for part in source.id_counts(at.epoch, at.batch)]
    if world.is_main:
        np.savez_compressed(run.path / "frequencies.npz", **source.frequencies(counts))  # type: ignore[arg-type]


def with_absolute_path(config: Config) -> Config:
    """Make the data path absolute, so that the saved config means the same in any working directory."""
    data = config.settings.data
    data = data.model_copy(update={"path": str(Path(data.path).absolute())})
    tables = config.settings.tables
    if tables.path:
        tables = tables.model_copy(update={"path": str(Path(tables.path).absolute())})
    return replace(config, settings=config.settings.model_copy(update={"data": data, "tables": tables}))


def _saved_config(run: RunDirectory) -> Config | None:
    """Return the config of a run that has a checkpoint; raise if the directory holds something else."""
    if foreign := run.foreign_file():
        raise ConfigError(f"{run.path} is not a run directory: it holds {foreign}. Choose another --run.")
    return load_config(run.config_file) if run.config_file.is_file() and committed(run.checkpoints) else None


def _is_finished(run: RunDirectory, dataset: Dataset) -> bool:
    status = run.read_status()
    is_done = status.get("state") == "done" and status.get("dataset") == dataset.fingerprint
    return is_done and run.results_file.is_file()


def _write_end(run: RunDirectory, error: BaseException) -> None:
    """Write the error to status.json, unless the file already says that the run is done or was stopped."""
    with contextlib.suppress(UserError, OSError):  # for example a full disk: the error itself matters more
        before = run.read_status()
        if before.get("state") in ("done", "preempted", "interrupted"):
            return
        state: State = "preempted" if isinstance(error, Preempted) else "failed"
        if isinstance(error, Interrupted | KeyboardInterrupt):
            state = "interrupted"
        reason = getattr(error, "signal", "") or str(error)
        restarts = max(getattr(error, "restarts", 0), process_environment().attempt)
        rank = getattr(error, "rank", None)
        facts = {"rank": rank, "reason": reason, "restarts": restarts, "seconds": before.get("seconds")}
        run.write_status(state, step=before.get("step", 0), **facts)
