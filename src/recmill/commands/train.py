"""`recmill train`: config + prepared dataset -> a run directory. On an existing one it goes on where it stopped."""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recmill.commands.assemble import (
    build_sharded,
    build_source,
    check_same_config,
    check_same_data,
    model_module,
    open_matching_dataset,
    open_trained_run,
    task_module,
)
from recmill.config import Config, differences, fingerprint, load_config, to_toml
from recmill.config.sections import TrainSection
from recmill.errors import ConfigError, Interrupted, Preempted, UserError
from recmill.failpoints import reach
from recmill.files.atomic import write_json, write_text
from recmill.hardware.cpu import threads_per_process
from recmill.hardware.precision import probe, worker_environment
from recmill.launch.local import is_launched_with, job_directory, num_restarts, run_job
from recmill.launch.signals import error_for, listening, stop_with_parent
from recmill.launch.watchdog import Hang, beat, watching
from recmill.observe.run_dir import RunDirectory, State, environment, versions
from recmill.schema import Dataset

if TYPE_CHECKING:
    from recmill.checkpoints.format import Position
    from recmill.world import World

log = logging.getLogger(__name__)

Results = dict[str, dict[str, Any]]


def train(
    config: str | Path | Mapping[str, Any],
    run: str | Path,
    *,
    procs: int = 1,
    overrides: Sequence[str] = (),
    verify: bool = False,
    init_from: str | Path | None = None,
    allow_partial: bool = False,
    fallback: bool = False,
) -> Results:
    """Train and return the final metrics by split: {"val": {...}, "test": {"auroc": ...}}.

    A run that a signal stopped raises `recmill.errors.Preempted` or, by Ctrl-C, `Interrupted`.
    `config`: a TOML file or the same as a mapping; `overrides`: ["optim.dense.lr=0.02", ...]; `procs`: processes on
    this machine (under torchrun: what torchrun started); `verify`: also check every byte of the dataset. A new run
    starts from the newest checkpoint of the run `init_from`; `allow_partial`: from what of it has the same size.
    `fallback`: if the newest checkpoint is damaged, go on from the newest that is not.
    """
    checked = _at_absolute_path(load_config(config, overrides))
    if allow_partial and init_from is None:
        raise ConfigError("--allow-partial goes with --init-from RUN: it says what to do where that run differs.")
    run_directory = RunDirectory(Path(run).absolute())
    _check_continuation(run_directory, checked)
    dataset = open_matching_dataset(checked, "digests" if verify else "sizes")
    if _is_finished(run_directory, checked, dataset):
        log.info("%s is finished: nothing to do", run_directory.path)
        return run_directory.read_results()
    arguments: dict[str, Any] = {
        "config": checked.as_dict(),
        "run": str(run_directory.path),
        "init_from": None if init_from is None else str(open_trained_run(init_from)[0].path.absolute()),
        "allow_partial": allow_partial,
        "fallback": fallback,
    }
    section = checked.settings.train
    wait_seconds = 3 * section.hang_seconds  # so that a hang is told by its stacks, not by a collective's timeout
    if is_launched_with(procs):
        with listening(section.stop_signals):
            stop_with_parent()
            from recmill.world import joined_world

            with joined_world(section.device, wait_seconds) as world:
                results = work(world, **arguments)
        return _unless_stopped(results)
    run_directory.path.mkdir(parents=True, exist_ok=True)
    arguments |= {"device": section.device, "wait_seconds": wait_seconds, "stop_signals": section.stop_signals}
    try:
        environment = _precision_environment(section, procs)
        return _unless_stopped(run_job("train", arguments, procs, section.max_restarts, environment))
    except UserError as error:
        _note_failure(run_directory, error)
        raise


def _precision_environment(section: TrainSection, procs: int) -> dict[str, str]:
    """Return what workers need to use train.precision on this CPU: oneDNN reads its variable when a process starts."""
    if section.precision == "float32" or section.device == "cuda":
        return {}
    return worker_environment(probe(section.precision, threads_per_process(procs)))


def work(world: "World", config: dict[str, Any], run: str, **start: Any) -> Results:
    """What each process does, from an empty or interrupted run directory to its results, or to {"stopped": by what}."""
    reach("train.begin")
    checked, run_directory = load_config(config), RunDirectory(run)
    section = checked.settings.train

    def note_hang(hang: Hang) -> None:
        log.error("%s; see hang-rank-%d.txt", hang.told(), hang.rank)
        if world.is_main:
            _note_end(run_directory, UserError(f"Hung: {hang.told()}."))

    hangs = watching(world.rank, section.hang_seconds, run_directory.path, job_directory(), note_hang)
    with listening(section.stop_signals) as stop, run_directory.locked() if world.is_main else nullcontext():
        try:
            with hangs:
                return _work(world, checked, run_directory, **start)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and stop.signal:
                error = error_for(stop.signal, f"Ended at once by a signal after {stop.signal}.")
            if world.is_main:
                _note_end(run_directory, error)
            raise error


def _work(
    world: "World",
    config: Config,
    run: RunDirectory,
    init_from: str | None = None,
    allow_partial: bool = False,
    fallback: bool = False,
) -> Results:
    from recmill.checkpoints import loading as checkpoint
    from recmill.checkpoints.format import Origin, Position
    from recmill.checkpoints.saver import Saver
    from recmill.kernels.native import native
    from recmill.observe.log import log_to_file
    from recmill.tables.first_values import fill_tables
    from recmill.tables.placement import as_text, placements
    from recmill.training.evaluate import evaluate_split
    from recmill.training.loop import early_end, fit, steps_in_all
    from recmill.training.optim import build_optimizer

    # The parts
    beat("starting")
    if world.device.type == "cpu" and config.settings.train.kernels == "auto":
        threading.Thread(target=native).start()  # compiled, the first time, while the rest is loaded
    world.broadcast(None)  # rank 0 holds the lock: now the others may log
    log_to_file(run.path, world.rank)
    dataset = open_matching_dataset(config)
    task, source = task_module(config), build_source(config, dataset, world.rank, world.size)
    tables = model_module(config).tables(config.model, dataset.description)
    model = build_sharded(config, dataset, world)
    optimizer = build_optimizer(model, config.settings.optim)
    placed = placements(model.plan, tables, config.settings.optim.tables.name)
    _log_facts(world, config, dataset, tables, source)
    if world.is_main:
        log.info("%s", as_text(placed, world.size))

    beat("loading")

    # Where to start: from a checkpoint, or from the seed
    origin = Origin(
        config=fingerprint(config),
        dataset=dataset.fingerprint,
        seed=config.settings.train.seed,
        global_batch_size=config.settings.train.global_batch_size,
        world_size=world.size,
        versions=versions(),
    )
    found = checkpoint.found_for_all(run.checkpoints, "newest", world, fallback, tidy=True)
    position = found.position if found else Position()
    if found:
        check_same_data(found, dataset)
        check_same_config(found, origin)
    earlier = None
    if init_from and not found:
        earlier = checkpoint.found_for_all(RunDirectory(init_from).checkpoints, "newest", world, fallback)
    num_steps = steps_in_all(config.settings.train, source.batches_per_epoch)
    if not num_steps:
        raise ConfigError(
            f"{dataset.path} has fewer rows for training than one train.global_batch_size of "
            f"{config.settings.train.global_batch_size:,}, and data.drop_last leaves them out. Change one of the two."
        )
    if position.step > num_steps:
        raise ConfigError(
            f"{run.path} is at step {position.step:,} already, beyond the {num_steps:,} of train.num_epochs and "
            "train.max_steps. Raise them, or choose another --run."
        )

    # From here on the run directory tells of this run
    if world.is_main:
        run.write_status("running", step=position.step)  # first: by this file the next start knows the directory
        write_text(run.config_file, to_toml(config))
        write_json(run.path / "env.json", environment(world.size, str(world.device)))
        write_json(run.path / "sharding.json", [asdict(table) for table in placed])
        run.results_file.unlink(missing_ok=True)
        run.forget_metrics_after(position.step if found else -1)
    if found:
        checkpoint.load(found, model, optimizer)
        optimizer.set_optimizer_step(position.step)  # FBGEMM's own count, which no state holds: fused Adam needs it
        log.info("going on from step %s: %s", f"{position.step:,}", found.path)
    else:
        fill_tables(model, tables, config.settings.train.seed)
        if earlier:
            checkpoint.load(earlier, model, optimizer, allow_partial)
            log.info("starting from step %s of another run: %s", f"{earlier.position.step:,}", earlier.path)
    beat("loaded", position.step)
    reach("train.loaded")

    # The training
    results: Results = {}

    def report(split: str, at: Position) -> None:
        metrics = task.new_metrics(config.settings.eval)
        results[split] = evaluate_split(model, task, source, split, metrics, config.settings, world)
        if world.is_main:
            run.append_metrics({"step": at.step, "epoch": at.epoch, "split": split, **results[split]})
            log.info("step %s  %s  %s", f"{at.step:,}", split, short(results[split]))

    def validate(at: Position) -> Position:
        report("val", at)
        return at.judged(world.broadcast(task.headline(results["val"])))

    def on_commit(step: int) -> None:
        run.write_status("running", step=step)

    saver = Saver(run.checkpoints, model, optimizer, origin, config.settings.checkpoint, world, on_commit)
    started = time.monotonic()
    if config.settings.eval.before_training and not position.step:
        report("val", position)
    fitted = fit(model, optimizer, task, source, config.settings, world, run, position, validate, saver)
    at = fitted.position
    if by := fitted.stopped_by:
        if world.is_main:
            run.write_status(by.state, step=at.step, rank=by.rank, reason=by.signal, restarts=num_restarts())
            log.info("stopped at step %s by %s on rank %d", f"{at.step:,}", by.signal, by.rank)
        return {"stopped": {"step": at.step, "rank": by.rank, "signal": by.signal}}
    reach("train.end")

    # The results
    report("test", at)
    if config.settings.data.multi_hot.collect_frequencies:
        _write_frequencies(run, source, at, world)
    if world.is_main:
        write_json(run.results_file, results)
        seconds = round(time.monotonic() - started, 1)
        end = early_end(at, config.settings.eval) or "all steps done"
        best = {"best_step": at.best_step, "best": at.best}
        facts = {**best, "seconds": seconds, "restarts": num_restarts(), "dataset": dataset.fingerprint}
        run.write_status("done", step=at.step, end=end, **facts)
        log.info("the end at step %s: %s", f"{at.step:,}", end)
    return results


def _write_frequencies(run: RunDirectory, source: Any, at: "Position", world: "World") -> None:
    """How often each id was trained on: by feature, [table rows], before and after companions came to it."""
    import numpy as np

    counts = [world.sum_counts(part) for part in source.id_counts(at.epoch, at.batch)]
    if world.is_main:
        np.savez_compressed(run.path / "frequencies.npz", **source.frequencies(counts))


def short(values: Mapping[str, Any]) -> str:
    shown = (f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items())
    return "  ".join(shown)


def _log_facts(world: "World", config: Config, dataset: Dataset, tables: Sequence[Any], source: Any) -> None:
    if not world.is_main:
        return
    values = sum(table.rows * table.dim for table in tables)
    log.info(
        "%s on %s: %d tables, %s rows, %s MB; %s batches of %s per epoch; %d process(es) on %s",
        config.model_name,
        dataset.path,
        len(tables),
        f"{sum(table.rows for table in tables):,}",
        f"{values * 4 / 1e6:,.1f}",
        f"{source.batches_per_epoch:,}",
        f"{config.settings.train.global_batch_size:,}",
        world.size,
        world.device,
    )
    if dataset.description.kind == "histories" and source.batches_per_epoch:
        log.info("%s", source.window_facts())
    if config.settings.data.train_on_validation:
        log.warning("validation's items are trained on: its numbers tell what is remembered. Look at the test's.")


def _at_absolute_path(config: Config) -> Config:
    """The saved config must mean the same from any directory."""
    values = config.as_dict()
    values["data"]["path"] = str(Path(config.settings.data.path).absolute())
    return load_config(values)


def _check_continuation(run: RunDirectory, config: Config) -> None:
    if foreign := run.foreign_file():
        raise ConfigError(f"{run.path} is not a run directory: it holds {foreign}. Choose another --run.")
    if not run.config_file.is_file() or not run.has_checkpoint():
        return
    changed = differences(load_config(run.config_file), config)
    if changed:
        raise ConfigError(
            f"{run.path} was started with another config:\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nChoose another --run, or train from its own config.toml."
        )


def _is_finished(run: RunDirectory, config: Config, dataset: Dataset) -> bool:
    """Exactly this config, on exactly this data, to its end."""
    status = run.read_status()
    is_done = status.get("state") == "done" and status.get("dataset") == dataset.fingerprint
    return is_done and run.results_file.is_file() and run.has_checkpoint() and load_config(run.config_file) == config


def _unless_stopped(results: Results) -> Results:
    if stopped := results.get("stopped"):
        step, rank, name = stopped["step"], stopped["rank"], stopped["signal"]
        raise error_for(name, f"Stopped at step {step:,} by {name}, which rank {rank} received.")
    return results


def _note_failure(run: RunDirectory, error: UserError) -> None:
    """By the parent, which knows the cause where rank 0 saw a consequence; not if another process is at work there."""
    with contextlib.suppress(UserError, OSError), run.locked():
        _note_end(run, error)


def _note_end(run: RunDirectory, error: BaseException) -> None:
    """A run that had ended before this one began stays what it was."""
    with contextlib.suppress(UserError, OSError):  # a full disk, say: the error itself is what matters
        before = run.read_status()
        if before.get("state") in ("done", "preempted", "interrupted"):
            return
        state: State = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        state = "preempted" if isinstance(error, Preempted) else state
        reason = getattr(error, "signal", "") or str(error)
        restarts = max(getattr(error, "restarts", 0), num_restarts())
        rank = getattr(error, "rank", None)
        run.write_status(state, step=before.get("step", 0), rank=rank, reason=reason, restarts=restarts)
