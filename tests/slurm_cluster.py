"""A Slurm cluster of two nodes on this machine, with its own munged, slurmctld and slurmd, on loopback."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .processes import free_port

_PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "slurmctld", "slurmd", "munged")
_CONFIG = """\
ClusterName=recmill
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={ports[0]}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=10
InactiveLimit=0
{more}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=n1,n2 MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Return the programs of Slurm and munge that are not installed here."""
    return [name for name in _PROGRAMS if not _found(name)]


def _found(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))


@contextmanager
def slurm_cluster(more: str = "") -> Iterator[dict[str, str]]:
    """Run the daemons within the block; yield the variables with which Slurm's commands find them."""
    with (
        tempfile.TemporaryDirectory(prefix="recmill-slurm-", ignore_cleanup_errors=True) as directory,
        _daemons(Path(directory), more) as variables,
    ):
        yield variables


@contextmanager
def _daemons(directory: Path, more: str) -> Iterator[dict[str, str]]:
    directory.chmod(0o755)  # munged insists that everybody can reach its socket, so pytest's directories will not do
    for name in ("state", "spool-n1", "spool-n2"):
        (directory / name).mkdir()
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    host = socket.gethostname().partition(".")[0]
    config = directory / "slurm.conf"
    ports: list[int] = []
    while len(set(ports)) < 3:
        ports = [free_port() for _ in range(3)]
    config.write_text(_CONFIG.format(host=host, user=user, directory=directory, ports=ports, more=more))
    environment = {**os.environ, "SLURM_CONF": str(config)}
    daemons: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> None:
        program = _found(name)
        assert program
        with (directory / f"{name}-{len(daemons)}.out").open("wb") as output:
            daemons.append(
                subprocess.Popen([program, *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT)
            )

    try:
        own = [f"--{what}={directory / f'munge.{what[:4]}'}" for what in ("pid-file", "log-file", "seed-file")]
        start("munged", "-F", f"--key-file={key}", f"--socket={directory / 'munge.socket'}", "--num-threads=2", *own)
        _wait(lambda: (directory / "munge.socket").exists(), directory, daemons)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", "n1")
        start("slurmd", "-D", "-N", "n2")
        _wait(lambda: _idle_nodes(environment) == 2, directory, daemons)
        yield {"SLURM_CONF": str(config)}
    finally:
        subprocess.run(["scancel", "--state=R", "--user", user], env=environment, capture_output=True, check=False)
        subprocess.run(["scancel", "--user", user], env=environment, capture_output=True, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def step_daemons(variables: dict[str, str], job: str) -> list[int]:
    """Return the processes of Slurm that watch over a job's script and steps on the nodes of this cluster."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (process / "cmdline").read_bytes()
            if title.startswith(f"slurmstepd: [{job}.".encode()):
                is_ours = variables["SLURM_CONF"].encode() in (process / "environ").read_bytes()
                found += [int(process.name)] if is_ours else []
    return found


def _idle_nodes(environment: dict[str, str]) -> int:
    shown = subprocess.run(
        ["sinfo", "-h", "-N", "-p", "low", "-o", "%T"], env=environment, capture_output=True, text=True, check=False
    )
    return shown.stdout.split().count("idle")


def _wait(condition: Callable[[], bool], directory: Path, daemons: list["subprocess.Popen[bytes]"]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        logs = "\n".join(file.read_text(errors="replace")[-2000:] for file in directory.glob("*.out"))
        assert time.monotonic() < deadline and not any(daemon.poll() for daemon in daemons), logs
        time.sleep(0.1)
