"""`recmill launch`: check a run, write its config and job script to RUN/jobs, and submit the script."""

import importlib.util
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from recmill.commands import assemble, train
from recmill.commands.options import flag
from recmill.commands.plan import check_fits
from recmill.config import Config, Overrides, load_config, to_toml
from recmill.environment import config_variables
from recmill.errors import ConfigError, ResourceError
from recmill.files.atomic import write_text
from recmill.files.timestamps import utc_now
from recmill.hardware.memory import memory_bytes
from recmill.jobs.place import Place, check_text, read_place
from recmill.jobs.records import Record, note_job, read_jobs
from recmill.jobs.schedulers import SCHEDULERS, check_with_slurm, job_state, started_at, stop_job, submit
from recmill.jobs.scripts import MPI_SIGNAL, SLURM_SIGNAL, Job, render
from recmill.planning.devices import Site, read_device
from recmill.schema import Dataset
from recmill.tables.spec import OPTIMIZER_STATES, USABLE_SHARE, VALUE_BYTES, TableSpec, state_values

_NEEDED_SIGNAL = {"slurm": SLURM_SIGNAL, "pbs": MPI_SIGNAL, "mpi": MPI_SIGNAL}


class Options(train.Options):
    on: str = flag(
        ...,
        "Launcher (local, torchrun, torchx, mpi, slurm, pbs or kubernetes) or profile: a path ending in .toml, "
        "the NAME of ~/.config/recmill/NAME.toml, or polaris.",
        metavar="PLACE",
    )
    nodes: int | None = flag(None, "Number of machines.  [default: the profile's, or 1]")
    procs: int | None = flag(None, "Processes per machine.  [default: the profile's, or 1]")  # type: ignore[assignment]
    time: str | None = flag(None, "Time limit of the job.", metavar="HH:MM:SS")
    account: str | None = flag(None, "Account or project that is charged.")
    queue: str | None = flag(None, "Partition (Slurm), queue (PBS) or Kueue's queue (Kubernetes).")
    chain: int | None = flag(
        None, "Number of jobs to queue; each resumes the run where the previous one stopped (PBS)."
    )
    image: str | None = flag(None, "Container image (Kubernetes, torchx).")
    mounts: list[str] = flag(
        [], "Volume with data or runs (Kubernetes); may be repeated.", "--mount", metavar="CLAIM:/PATH"
    )
    data_elsewhere: bool = flag(False, "Do not check the dataset, because this machine cannot see it.")
    dry_run: bool = flag(False, "Print the script; write and submit nothing.")


@dataclass(frozen=True)
class Launched:
    """A job, the text of its script, and the submitted jobs. `command` runs the script without a scheduler."""

    job: Job
    text: str
    command: str = ""
    records: list[Record] = field(default_factory=list)


def launch(
    config: str | Path,
    run: str | Path,
    *,
    on: str,
    overrides: Overrides = (),
    init_from: str | Path | None = None,
    allow_partial: bool = False,
    fallback: bool = False,
    profile: bool = False,
    verify: bool | None = None,
    data_elsewhere: bool = False,
    dry_run: bool = False,
    **place_options: Any,
) -> Launched:
    """Check a run and submit it. Without a scheduler, call `start` with the result to run its script.

    `on` is a launcher or a profile, and `place_options` override keys of the profile. With `dry_run`, nothing is
    written or submitted: use `text` of the result.
    """
    flags = {name: value for name, value in place_options.items() if value not in (None, [], ())}
    for name, value in flags.items():
        for text in value if isinstance(value, list | tuple) else [value]:
            check_text(f"'{name}'", str(text))
    profiles = Path.home() / ".config" / "recmill"
    place = read_place(on, flags, profiles)
    checked, directory, dataset = _check(config, run, overrides, data_elsewhere)
    _check_place(place, checked)
    if dataset is not None:
        _check_memory(place, checked, dataset, is_planned=not dry_run)
    if allow_partial and init_from is None:
        raise ConfigError("--allow-partial goes with --init-from RUN: it says what to do where that run differs.")
    if init_from is not None and not data_elsewhere:
        assemble.open_start(init_from)
    python = place.python or ("python3" if place.launcher == "kubernetes" else sys.executable)
    arguments = [*(["--init-from", str(Path(init_from).absolute())] if init_from is not None else [])]
    given = {
        "--allow-partial": allow_partial,
        "--fallback": fallback,
        "--profile": profile,
        "--verify": verify,
        "--no-verify": verify is False,
    }
    arguments += [name for name, is_given in given.items() if is_given]
    for argument in (*arguments, python):
        check_text("The argument", argument)
    check_text("--run", str(directory))
    job = Job(directory, place, python, tuple(arguments), to_toml(checked))
    text = render(job)
    if dry_run:
        return Launched(job, text)
    for record in read_jobs(job.jobs)[-1:]:
        if (state := job_state(record).state) in ("queued", "running"):
            raise ResourceError(
                f"{directory}: job {record.id} of this run is {state}. Wait for it, or stop it with recmill cancel."
            )
        if record.launcher == place.launcher == "kubernetes" and state == "gone":  # it keeps jobs that have ended
            stop_job(record, now=False)
    if place.launcher == "slurm":
        check_with_slurm(text, place.queue)
    script = _write(job, text)
    command = f"bash {quote(str(script))}{' NUMBER' if place.launcher == 'local' else ''}"
    return Launched(job, text, command, _submit(job, script) if place.launcher in SCHEDULERS else [])


def _check(
    config: str | Path, run: str | Path, overrides: Overrides, data_elsewhere: bool
) -> tuple[Config, Path, Dataset | None]:
    loaded = load_config(config, overrides, config_variables())
    if data_elsewhere:
        return train.with_absolute_path(loaded), Path(run).absolute(), None
    checked, directory, dataset, is_finished = train.check_run(loaded, run, "sizes")
    if is_finished:
        raise ConfigError(f"{directory.path} is finished: there is nothing to launch. Choose another --run.")
    return checked, directory.path, dataset


def _check_place(place: Place, config: Config) -> None:
    """Raise ConfigError if the config does not suit the place."""
    section = config.settings.train
    if section.global_batch_size < place.size:
        raise ConfigError(
            f"train.global_batch_size = {section.global_batch_size:,}, but {place.nodes} nodes with {place.procs} "
            f"processes each are {place.size:,} processes: some would have no rows. Raise it, or use fewer."
        )
    signal = f"SIG{_NEEDED_SIGNAL.get(place.launcher, 'TERM')}"
    if signal not in section.stop_signals:
        raise ConfigError(
            f"train.stop_signals = {list(section.stop_signals)} lacks {signal}, which {place.launcher} sends before it "
            "ends a job. Add it."
        )


def _check_memory(place: Place, config: Config, dataset: Dataset, *, is_planned: bool) -> None:
    """Raise ResourceError if the tables cannot fit in the memory of the machines, if that is known.

    First each row is counted once, with its optimizer's state, which needs no torch. Then the tables are planned as
    `recmill plan` does it, unless torch is not installed here.
    """
    is_here = place.launcher in ("local", "torchrun", "mpi") and place.nodes == 1
    memory = place.memory_gb * 10**9 if place.memory_gb else memory_bytes() if is_here else None
    device = read_device(place.device or "cpu")
    if device.kind == "cpu":
        if memory is None or config.settings.train.device == "cuda" or place.gpus:
            return
        _check_sum(place, config, assemble.table_specs(config, dataset), memory)
        device = device.model_copy(update={"memory_gb": memory / 1e9})
    if is_planned and importlib.util.find_spec("torch"):
        check_fits(config, dataset, Site(place.nodes, place.procs, device))


def _check_sum(place: Place, config: Config, tables: Sequence[TableSpec], memory: int) -> None:
    """Compare the bytes of all rows with the `memory` of all machines."""
    settings = config.settings
    state = OPTIMIZER_STATES[settings.optim.tables.name]
    in_memory = [table for table in tables if settings.tables.store_of(table.name, *table.features) != "cached_ssd"]
    values = sum(table.rows * table.dim + state_values(state, table.rows, table.dim) for table in in_memory)
    needed = VALUE_BYTES * values
    needed += place.size * (settings.tables.cache_memory_budget_mb << 20) if len(in_memory) < len(tables) else 0
    usable = USABLE_SHARE * place.nodes * memory
    if needed > usable:
        raise ResourceError(
            f"The tables need at least {needed / 1e9:,.1f} GB with their optimizer's state, but can use "
            f"{usable / 1e9:,.1f} GB: {USABLE_SHARE:.0%} of {place.nodes} x {memory / 1e9:,.1f} GB. Use more machines, "
            "smaller tables, a smaller model.embedding_dim, or tables.store = 'cached_ssd'."
        )


def _write(job: Job, text: str) -> Path:
    """Write the resolved config and the script to RUN/jobs, and return the path of the script."""
    job.jobs.mkdir(parents=True, exist_ok=True)
    write_text(job.jobs / "config.toml", job.config_text)
    script = job.jobs / ("job.json" if job.place.launcher == "kubernetes" else "job.sh")
    write_text(script, text)
    return script


def _submit(job: Job, script: Path) -> list[Record]:
    records: list[Record] = []
    for _ in range(job.place.chain):
        after = records[-1].id if records else None
        records.append(_record(job, submit(job.place.launcher, script, job.name, after)))
        try:
            note_job(job.jobs, records[-1])
        except OSError:  # a job that nobody knows of would train
            stop_job(records[-1], now=True)
            raise
    return records


def _record(job: Job, job_id: str, started: int = 0) -> Record:
    place = job.place
    job_id, _, cluster = job_id.partition(";")
    facts = (place.launcher, job_id, job.name, place.nodes, place.procs, utc_now(), socket.gethostname(), started)
    return Record(*facts, namespace=place.namespace, kind=place.kind, cluster=cluster or None)


def start(launched: Launched) -> None:
    """Replace this process with the script, unless a scheduler runs it or the user has to start it on each machine."""
    job = launched.job
    if launched.records or job.place.starts_on_each_node:
        return
    note_job(job.jobs, _record(job, str(os.getpid()), started_at(os.getpid())))
    os.execvp("bash", ["bash", str(job.jobs / "job.sh")])
