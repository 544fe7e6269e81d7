"""Render job scripts. The same job gives the same text on every machine, and every value is quoted or validated."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import join, quote

from recmill.jobs.kubernetes import manifests
from recmill.jobs.place import Place
from recmill.launch.processes import TUNING

SLURM_SIGNAL = "USR2"  # before the time limit, to every task
MPI_SIGNAL = "USR1"  # Open MPI forwards it to its ranks; on SIGTERM it kills them
_PORT = 20000  # the first of 20,000 ports, from which the job id selects one: two jobs may share a machine
_TORCHRUN_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


@dataclass(frozen=True)
class Job:
    """A run and where to train it. `arguments`: further arguments of `recmill train`."""

    run: Path  # absolute
    place: Place
    python: str
    arguments: tuple[str, ...] = ()
    config_text: str = ""  # for launchers that do not read it from the run directory

    @property
    def name(self) -> str:
        """Return a name that every scheduler accepts. Kubernetes identifies a job by it, so the path counts there.

        Pods of a JobSet add up to 17 characters to it, and may have 63.
        """
        reduced = re.sub("[^a-z0-9]+", "-", self.run.name.lower())[:31].strip("-")
        is_unique = self.place.launcher == "kubernetes"
        digest = hashlib.sha256(os.fsencode(self.run)).hexdigest()[:6] if is_unique else ""
        return "-".join(part for part in ("recmill", reduced, digest) if part)

    @property
    def jobs(self) -> Path:
        return self.run / "jobs"

    @property
    def train(self) -> list[str]:
        """Return the command that a rank runs. torchrun takes --run for an abbreviation of its own option."""
        config = str(self.jobs / "config.toml")
        return ["-m", "recmill", "train", config, "--run-dir", str(self.run), *self.arguments]


def render(job: Job) -> str:
    """Return the text of the job's script, or of its manifests."""
    if job.place.launcher == "kubernetes":
        return json.dumps(manifests(job.name, str(job.run), job.place, job.arguments, job.config_text), indent=2) + "\n"
    return "\n".join(_RENDER[job.place.launcher](job)) + "\n"


def _slurm(job: Job) -> list[str]:
    place = job.place
    tasks = [f"--ntasks-per-node={place.procs}", *([f"--cpus-per-task={place.cpus}"] if place.cpus else [])]
    options = [f"--job-name={job.name}", f"--nodes={place.nodes}", *tasks]
    time, memory = place.seconds and _clock(place.seconds), place.memory_gb and f"{place.memory_gb}G"
    given = {"time": time, "account": place.account, "partition": place.queue}
    given |= {"gpus-per-node": place.gpus and str(place.gpus), "mem": memory}
    options += [f"--{name}={value}" for name, value in given.items() if value]
    output = quote(str(job.jobs).replace("%", "%%") + "/%j.out")
    options += [f"--signal={SLURM_SIGNAL}@{place.warning_seconds}", "--requeue", "--open-mode=append"]
    # srun no longer takes --cpus-per-task from sbatch; without it each task would be bound to one core.
    return [
        *_head(job, "#SBATCH", [*options, f"--output={output}", *place.directives], "$SLURM_JOB_ID"),
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'address=$(scontrol -o show node "$head" | tr " " "\\n" | sed -n "s/^NodeAddr=//p")',
        'export MASTER_ADDR="${address:-$head}"',
        *_exports(job, "id"),
        "trap : TERM USR1 USR2  # this shell must outlive its tasks",
        f"srun {' '.join(tasks)} --kill-on-bad-exit=1 --unbuffered {_python(job)}",
        *_tail(job, "code=$?"),
    ]


def _pbs(job: Job) -> list[str]:
    place = job.place
    chunk = [str(place.nodes), *([place.chunk] if place.chunk else [])]
    chunk += [f"mem={place.memory_gb}gb"] if place.memory_gb else []
    options = [f"-N {job.name[:15].strip('-')}", f"-l select={':'.join(chunk)}"]
    options += [f"-l walltime={_clock(place.seconds)}"] if place.seconds else []
    options += [f"-A {place.account}"] if place.account else []
    options += [f"-q {place.queue}"] if place.queue else []
    return [
        *_head(job, "#PBS", [*options, "-j oe", "-r y", *place.directives], "${PBS_JOBID%%.*}"),
        'export MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")',
        *_exports(job, "${id//[^0-9]/}"),
        *_mpi_command(job),
    ]


def _mpi(job: Job) -> list[str]:
    address = job.place.hosts[0] if job.place.nodes > 1 else "127.0.0.1"
    return [*_head(job, "", [], "$$"), f"export MASTER_ADDR={address}", *_exports(job, "id"), *_mpi_command(job)]


def _mpi_command(job: Job) -> list[str]:
    place = job.place
    if place.mpi == "pals":
        options = [f"--ppn {place.procs}", *([f"--depth {place.cpus} --cpu-bind depth"] if place.cpus else [])]
        options += ["--envall", "--line-buffer"]
    elif place.mpi == "mpich":
        options = [f"-ppn {place.procs}", "-genvall", *([f"-hosts {','.join(place.hosts)}"] if place.hosts else [])]
    else:
        cores = f":PE={place.cpus}" if place.cpus else " --bind-to none"
        options = [f"--map-by ppr:{place.procs}:node{cores}"]
        options += [f"--host {','.join(f'{host}:{place.procs}' for host in place.hosts)}"] if place.hosts else []
        names = ["MASTER_ADDR", "MASTER_PORT", "RECMILL_ERRORS", "RECMILL_WORLD_SIZE", "OMP_NUM_THREADS"]
        names += [*TUNING, *place.env, *(["RECMILL_DEADLINE"] if place.seconds else [])]
        options += [f"-x {name}" for name in sorted(set(names))]
    program = "mpirun" if place.mpi == "openmpi" else "mpiexec"
    words = [program, "-n", str(place.size), *options, *map(quote, place.mpi_options), _python(job)]
    return _in_background(job, " ".join(words), MPI_SIGNAL)


def _in_background(job: Job, command: str, signal: str) -> list[str]:
    """Return lines that run a command and forward signals: bash delays traps while a command is in the foreground."""
    return [
        f"{command} &",
        "child=$!",
        f"trap 'kill -{signal} \"$child\"' TERM USR1 USR2",
        "while true; do",
        '    wait "$child"; code=$?  # returns early when a signal is trapped',
        '    kill -0 "$child" 2>/dev/null || break',
        "done",
        'wait "$child"; ended=$?  # it may have ended before kill -0, and code is then that of the signal',
        '[ "$ended" -eq 127 ] || code=$ended',
        "trap : TERM USR1 USR2",
        *_tail(job),
    ]


def _torchrun(job: Job) -> list[str]:
    """Return the script of a machine; with several machines, the user starts it on each of them."""
    place = job.place
    meeting = '--master-addr 127.0.0.1 --master-port "$MASTER_PORT"'
    if place.nodes > 1:
        meeting = f"--rdzv-backend c10d --rdzv-id {job.name} --rdzv-endpoint {place.hosts[0]}:{_PORT}"
    words = [quote(job.python), "-m torch.distributed.run", f"--nnodes {place.nodes}"]
    words += [f"--nproc-per-node {place.procs}", meeting, f"--signals-to-handle {_TORCHRUN_SIGNALS}"]
    train = [word.replace("$", "$$") for word in job.train]  # torchrun replaces $local_rank, and $$ by $
    command = " ".join([*words, *map(quote, train)])
    return [*_head(job, "", [], "$$"), *_exports(job, "id"), *_in_background(job, command, "TERM")]


def _local(job: Job) -> list[str]:
    place = job.place
    nodes = []
    if place.nodes > 1:
        nodes = [
            f"export RECMILL_NODES={place.nodes} MASTER_ADDR={place.hosts[0]} MASTER_PORT={_PORT}",
            'export RECMILL_NODE_RANK="${1:?give the number of this machine, from 0}"',
        ]
    return [
        *_head(job, "", [], "$$"),
        *nodes,
        *_environment(job),
        *_in_background(job, f"{_python(job)} --procs {place.procs}", "TERM"),
    ]


def _torchx(job: Job) -> list[str]:
    place = job.place
    component = Path(__file__).with_name("torchx_component.py")
    options = {"config": job.jobs / "config.toml", "run": job.run, "j": f"{place.nodes}x{place.procs}"}
    options |= {"cpu": place.cpus and place.cpus * place.procs, "gpu": place.gpus or None, "image": place.image}
    options |= {"memMB": place.memory_gb and place.memory_gb * 1000, "args": join(job.arguments) or None}
    mounts = [part.split(":", 1) for part in place.mounts]
    options |= {"mounts": ",".join(f"type=volume,src={claim},dst={path}" for claim, path in mounts) or None}
    is_slurm = place.scheduler == "slurm"
    named = {"partition" if is_slurm else "queue": place.queue, "namespace": place.namespace}
    settings = ",".join(f"{name}={value}" for name, value in named.items() if value is not None)
    # Without a workspace, torchx takes the image as it is. It waits by itself only for processes on this machine.
    words = ["torchx", "run", "--workspace=", "--wait", "-s", place.scheduler]
    words += [*(["-cfg", settings] if settings else []), f"{component}:train"]
    words += [f"--{name}={value}" for name, value in options.items() if value is not None]
    path = f'export PATH="$PATH":{quote(str(Path(job.python).parent))}'  # torchx calls torchrun
    return [*_head(job, "", [], "$$"), path, " ".join(map(quote, words)), *_tail(job, "code=$?")]


_RENDER: dict[str, Callable[[Job], list[str]]] = {
    "local": _local,
    "torchrun": _torchrun,
    "torchx": _torchx,
    "mpi": _mpi,
    "slurm": _slurm,
    "pbs": _pbs,
}


def _head(job: Job, mark: str, directives: list[str], job_id: str) -> list[str]:
    """Return the directives, the variables `jobs`, `python` and `id`, and the lines of `setup`."""
    return [
        "#!/bin/bash -l",
        *(f"{mark} {directive}" for directive in directives),
        f"jobs={quote(str(job.jobs))}",
        f"python={quote(job.python)}",
        f'id="{job_id}"',
        "started=$(date +%s)",
        'cd "$jobs" || {',
        '    echo "recmill: resource error: $jobs is not visible on $(hostname). Choose a --run on a shared disk." >&2',
        "    exit 5",
        "}",
        *(['exec >> "$jobs/$id.out" 2>&1'] if mark == "#PBS" else []),
        'export RECMILL_ERRORS="$jobs/$id.errors"',
        'rm -rf "$RECMILL_ERRORS" "$id.end.json" && mkdir "$RECMILL_ERRORS"  # those of a start before a requeue',
        *job.place.setup,
    ]


def _exports(job: Job, number: str) -> list[str]:
    """Return the environment of the processes; a user's own thread and allocator settings take precedence."""
    place = job.place
    threads = str(place.cpus) if place.cpus else f"$(( $(nproc) < {place.procs} ? 1 : $(nproc) / {place.procs} ))"
    return [
        f"export MASTER_PORT=$(( {_PORT} + {number} % 20000 ))",
        f"export RECMILL_WORLD_SIZE={place.size}",
        f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{threads}}}"',
        *(f'export {name}="${{{name}:-{value}}}"' for name, value in TUNING.items()),
        *_environment(job),
    ]


def _environment(job: Job) -> list[str]:
    place = job.place
    lines = [f"export {name}={quote(value)}" for name, value in place.env.items()]
    if place.seconds:
        lines.append(f"export RECMILL_DEADLINE=$(( started + {place.seconds - place.warning_seconds} ))")
    return lines


def _python(job: Job) -> str:
    return " ".join(map(quote, [job.python, "-P", *job.train]))


def _tail(job: Job, *first: str) -> list[str]:
    """Return what follows training: the lines of `after`, and the call of `recmill.jobs.finish`."""
    return [
        *first,
        *job.place.after,
        '"$python" -P -m recmill.jobs.finish "$jobs" "$id" "$code" "$started"',
        "exit $?",
    ]


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
