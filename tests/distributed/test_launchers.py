"""Jobs on a real Slurm cluster, with real mpiexec, torchrun and torchx: the same losses everywhere, interrupted or not.

`make launchers` installs what these tests need; without it they are skipped.
"""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import tomli_w

from recmill.commands.jobs import cancel, logs, status
from recmill.jobs.records import read_job_end, read_jobs

from ..conftest import REPO, Config
from ..processes import descendants, free_port, send, wait_until
from ..slurm_cluster import missing_programs, slurm_cluster, step_daemons
from .runs import loss_by_step

RECMILL = str(Path(sys.executable).parent / "recmill")
TOOLS = Path(sys.prefix) / "launchers"  # torchx and MPICH
AS_ROOT = ["--allow-run-as-root", "--oversubscribe"]
PROFILES = {
    "openmpi": {"launcher": "mpi", "mpi": "openmpi", "procs": 2, "mpi_options": AS_ROOT},
    "mpich": {"launcher": "mpi", "mpi": "mpich", "procs": 2},
    "torchrun": {"launcher": "torchrun", "procs": 2},
    "torchx": {"launcher": "torchx", "procs": 2, "cpus": 1},
}
NEEDED = {"openmpi": "mpirun", "mpich": str(TOOLS / "bin" / "mpiexec"), "torchx": str(TOOLS / "bin" / "torchx")}
SLOW = {"RECMILL_FAIL": "train.step:slow"}  # a run that is to be stopped is not done before
needs_slurm = pytest.mark.skipif(bool(missing_programs()), reason=f"no {missing_programs()}: see `make launchers`")


@pytest.fixture(scope="module")
def config(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 120 steps, which takes seconds, with a checkpoint every 10."""
    values: Config = {
        "data": {"path": str(clicks)},
        "model": {"name": "dlrm", "embedding_dim": 8, "bottom_mlp": [16, 8], "top_mlp": [16]},
        "train": {"device": "cpu", "global_batch_size": 125, "log_every_steps": 1, "num_epochs": 99, "max_steps": 120},
        "eval": {"global_batch_size": 300, "every_steps": 60},
        "checkpoint": {"every_steps": 10},
    }
    path = tmp_path_factory.mktemp("launchers") / "run.toml"
    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def losses(config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """What two processes of our own launcher compute, without an interruption."""
    run = tmp_path_factory.mktemp("reference") / "run"
    done = subprocess.run([RECMILL, "train", config, "--run", run, "--procs", "2"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return loss_by_step(run)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with slurm_cluster() as variables:
        yield variables


def launch(config: Path, run: Path, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [RECMILL, "launch", str(config), "--run", str(run), *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def has_trained(run: Path) -> bool:
    return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0


def has_saved(run: Path) -> bool:
    return any((run / "checkpoints").glob("step-*/MANIFEST.json"))


@pytest.mark.parametrize("name", PROFILES)
def test_losses_are_those_of_our_own_launcher_also_after_a_stop(
    name: str, config: Path, losses: dict[int, float], tmp_path: Path
) -> None:
    if name in NEEDED and not shutil.which(NEEDED[name]):
        pytest.skip(f"no {NEEDED[name]}: see `make launchers`")
    profile = tmp_path / f"{name}.toml"
    profile.write_text(tomli_w.dumps(PROFILES[name]), encoding="utf-8")
    variables = {"PATH": f"{TOOLS / 'bin'}:{os.environ['PATH']}" if name != "openmpi" else os.environ["PATH"]}
    if name == "torchx":
        variables["PYTHONPATH"] = str(TOOLS)
    run = tmp_path / "it's $(HOME) $$ ${app_id}, 5% a=b; ö"
    if name in ("openmpi", "mpich"):  # Open MPI would kill its ranks on SIGTERM: the script sends SIGUSR1 instead
        job = launch(config, run, "--on", str(profile), **variables, **SLOW)
        wait_until(lambda: has_saved(run), 120)
        job.send_signal(signal.SIGTERM)
        output = job.communicate(timeout=120)[0]
        assert job.returncode == 75, output
        assert status(run).state == "preempted"
        assert 0 < status(run).step < 120
    job = launch(config, run, "--on", str(profile), **variables)
    output = job.communicate(timeout=200)[0]
    assert job.returncode == 0, output
    assert loss_by_step(run) == losses
    assert status(run).state == "done"
    assert ("starting from" in output or "resuming" in output) == (name in ("openmpi", "mpich"))


def train_past_a_deadline(config: Path, run: Path, seconds: int) -> int:
    """Train for some steps, pause until the deadline is over, continue, and return the step at which training ends."""
    deadline = int(time.time()) + seconds
    endless = ("--on", "local", "--procs", "2", "--set", "train.max_steps=100000")
    job = launch(config, run, *endless, RECMILL_DEADLINE=str(deadline))
    wait_until(lambda: job.poll() is not None or has_trained(run), 200)
    processes = descendants(job.pid)
    for pid in processes:
        send(pid, signal.SIGSTOP)
    wait_until(lambda: time.time() > deadline, 200)
    for pid in processes:
        send(pid, signal.SIGCONT)
    output = job.communicate(timeout=200)[0]
    assert job.returncode == 75, output
    return status(run).step


def test_a_run_is_preempted_at_its_deadline_and_continues_without_it_with_the_same_losses(
    config: Path, losses: dict[int, float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    here = ("--on", "local", "--procs", "2")
    job = launch(config, run, *here, RECMILL_DEADLINE="1", PBS_JOBID="7.server")  # in 1970
    output = job.communicate(timeout=200)[0]
    assert job.returncode == 75, output
    found = status(run)
    assert (found.state, found.reason, found.step) == ("preempted", "the time limit", 0)
    facts = json.loads((run / "env.json").read_text(encoding="utf-8"))
    assert (facts["launcher"], facts["job_id"]) == ("recmill", "7.server")
    # A slow machine may need more than 10 s to get to the first step.
    stopped_at = next(step for seconds in (10, 40, 160) if (step := train_past_a_deadline(config, run, seconds)))
    assert status(run).reason == "the time limit"
    assert stopped_at in loss_by_step(run)
    rest = ("--set", f"train.max_steps={max(120, stopped_at + 1)}")
    job = launch(config, run, *here, *rest)
    output = job.communicate(timeout=200)[0]
    assert job.returncode == 0, output
    again = launch(config, run, *here, *rest)
    assert "is finished: there is nothing to launch" in again.communicate(timeout=200)[0]
    assert {step: loss for step, loss in loss_by_step(run).items() if step <= 120} == losses


def start_nodes(
    config: Path, run: Path, port: int, *, within: Sequence[Sequence[str]] = ((), ()), **variables: str
) -> list["subprocess.Popen[str]"]:
    """Start the command on two "machines"; `within` holds the words before it on each."""
    place = {"RECMILL_NODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables}
    return [
        subprocess.Popen(
            [*within[int(node)], RECMILL, "train", str(config), "--run", str(run)],
            env={**os.environ, **place, "RECMILL_NODE_RANK": node},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for node in "01"
    ]


def test_two_nodes_of_our_own_launcher_compute_the_same_and_stop_together(
    config: Path, losses: dict[int, float], tmp_path: Path
) -> None:
    nodes = start_nodes(config, tmp_path / "run", free_port(), **SLOW)
    wait_until(lambda: has_saved(tmp_path / "run"), 120)
    nodes[1].send_signal(signal.SIGTERM)  # as when one machine is reclaimed
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], errors
    assert all("by SIGTERM on rank 1" in error for error in errors)
    nodes = start_nodes(config, tmp_path / "run", free_port())
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], errors
    assert loss_by_step(tmp_path / "run") == losses


def test_a_node_whose_partner_never_comes_or_is_killed_ends_and_names_the_rank(config: Path, tmp_path: Path) -> None:
    alone, partner = start_nodes(config, tmp_path / "run", free_port(), RECMILL_FAIL="train.step@step=3@rank=1:kill")
    errors = [node.communicate(timeout=120)[1] for node in (alone, partner)]
    assert (alone.returncode, partner.returncode) == (5, 5), errors
    assert "Process 1 of the job was killed by SIGKILL" in errors[1]
    assert "rank 1 of the job ended" in errors[0]
    short = tmp_path / "short.toml"
    short.write_text(
        config.read_text(encoding="utf-8").replace("[train]", "[train]\njoin_seconds = 2.0"), encoding="utf-8"
    )
    alone, partner = start_nodes(short, tmp_path / "other", free_port(), RECMILL_FAIL="train.begin@rank=9:kill")
    partner.kill()
    assert "Rank 1 of the job did not join within train.join_seconds" in alone.communicate(timeout=120)[1]
    assert alone.returncode == 5
    partner.communicate()


@pytest.fixture
def networks() -> Iterator[list[list[str]]]:
    """Two network namespaces that a cable joins, 10.77.0.1 and .2: the words that run a command in each."""
    with ExitStack() as stack:
        words = []
        try:
            for _ in range(2):
                hold = ["unshare", "--net", "sh", "-c", "echo && exec cat"]
                holder = stack.enter_context(subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
                stack.callback(holder.kill)
                assert holder.stdout is not None
                holder.stdout.readline()  # it is in its namespace
                words.append(["nsenter", f"--target={holder.pid}", "--net"])
            cable = f"ip link add cable1 type veth peer name cable2 netns {holder.pid}"
            subprocess.run([*words[0], *cable.split()], check=True)
            for number, enter in enumerate(words, 1):
                end = f"cable{number}"
                lines = f"link set lo up\nlink set {end} up\naddress add 10.77.0.{number}/24 dev {end}\n"
                subprocess.run([*enter, "ip", "-batch", "-"], input=lines, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need root, unshare, nsenter and ip: {error}")
        yield words


def test_a_machine_that_loses_its_network_is_named_by_the_other_after_hang_seconds(
    config: Path, networks: list[list[str]], tmp_path: Path
) -> None:
    endless = config.read_text(encoding="utf-8").replace("max_steps = 120", "hang_seconds = 6.0")
    (tmp_path / "run.toml").write_text(endless, encoding="utf-8")
    run = tmp_path / "run"
    nodes = start_nodes(tmp_path / "run.toml", run, 29500, within=networks, MASTER_ADDR="10.77.0.1")
    wait_until(lambda: has_saved(run), 120)
    subprocess.run([*networks[1], "ip", "link", "set", "cable2", "down"], check=True)
    errors = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [5, 5], errors
    assert "rank 1 does not answer: its machine cannot be reached" in errors[0]
    assert "rank 0 does not answer: its machine cannot be reached" in errors[1]
    assert "rank 1 does not answer" in json.loads((run / "status.json").read_text())["reason"]


@needs_slurm
@pytest.mark.parametrize("number", range(1, 1 + int(os.environ.get("REHEARSALS", "1"))))  # see `make rehearse`
def test_a_preempted_slurm_job_saves_is_requeued_and_ends_with_the_same_losses(
    number: int,
    config: Path,
    losses: dict[int, float],
    cluster: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster["SLURM_CONF"])
    run = tmp_path / "a run of 5%"
    launched = launch(config, run, "--on", "slurm", "--nodes", "2", "--time", "00:30:00")
    output = launched.communicate(timeout=120)[0]
    assert launched.returncode == 0, output
    job = status(run).job
    assert status(run).state in ("queued", "running")
    assert (run / "jobs" / "job.sh").is_file()
    wait_until(lambda: has_saved(run), 120)
    other = ["sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true"]
    subprocess.run(other, check=True, capture_output=True)
    wait_until(lambda: read_job_end(run / "jobs", job).get("state") == "preempted", 120)
    stopped_at = read_job_end(run / "jobs", job)["step"]
    assert 0 < stopped_at < 120
    wait_until(lambda: status(run).state == "queued", 60)
    # Slurm starts a requeued job after two minutes; its owner may ask for less. It must start later than the second in
    # which the first start was ended, and after the end of its script, or Slurm takes these for the second start's.
    wait_until(lambda: not step_daemons(cluster, job), 60)
    now = ["scontrol", "update", f"JobId={job}", "StartTime=now+3"]
    wait_until(lambda: subprocess.run(now, capture_output=True, check=False).returncode == 0)
    wait_until(lambda: status(run).state not in ("queued", "running"), 120)
    text = "".join(logs(run))
    assert status(run).state == "done", text
    assert f"recmill: requeueing job {job}" in text
    assert loss_by_step(run) == losses
    assert read_job_end(run / "jobs", job)["restarts"] == 1


@needs_slurm
def test_wrong_launches_under_slurm_are_named_within_seconds_and_a_killed_rank_ends_the_job(
    config: Path, cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster["SLURM_CONF"])
    refused = launch(config, tmp_path / "refused", "--on", "slurm", "--nodes", "5")  # sbatch alone would queue it
    assert "sbatch --test-only: allocation failure: Requested node configuration" in refused.communicate(timeout=60)[0]
    assert refused.returncode == 5
    assert not (tmp_path / "refused").exists()
    drained = tmp_path / "drained"
    subprocess.run(["scontrol", "update", "NodeName=n1,n2", "State=DRAIN", "Reason=test"], check=True)
    assert launch(config, drained, "--on", "slurm", "--nodes", "2").wait(60) == 0  # Slurm says the same, for now
    assert status(drained).state == "queued"
    assert cancel(drained) == [status(drained).job]
    subprocess.run(["scontrol", "update", "NodeName=n1,n2", "State=RESUME"], check=True)
    train = f"{RECMILL} train {config} --run {tmp_path}/wrong"
    batch = ["sbatch", "--wait", "-N2", "--ntasks-per-node=1", "-o", str(tmp_path / "out")]
    subprocess.run([*batch, "--wrap", train], check=False, capture_output=True, timeout=120)
    assert "This Slurm job has 2 tasks, but its batch script started this process" in (tmp_path / "out").read_text()
    srun = f"RECMILL_WORLD_SIZE=4 srun {train}"
    done = subprocess.run([*batch, "--wrap", srun], check=False, capture_output=True, timeout=120)
    assert "4 processes were asked for (RECMILL_WORLD_SIZE), but Slurm started 2" in (tmp_path / "out").read_text()
    assert done.returncode == 2
    run = tmp_path / "killed"
    monkeypatch.setenv("RECMILL_FAIL", "train.step@step=3@rank=1:kill")
    assert launch(config, run, "--on", "slurm", "--nodes", "2").wait(120) == 0
    monkeypatch.delenv("RECMILL_FAIL")
    wait_until(lambda: status(run).state == "failed", 120)
    assert "rank 1 of the job ended" in status(run).reason
    assert read_job_end(run / "jobs", status(run).job)["code"] in (5, 137)


PROLOG = """#!/bin/sh
echo "export PBS_JOBID=$SLURM_JOB_ID.server"
echo "export PBS_NODEFILE={nodes}"
"""


@needs_slurm
@pytest.mark.skipif(not shutil.which("qsub"), reason="no qsub: see `make launchers`")
@pytest.mark.skipif(not shutil.which(NEEDED["mpich"]), reason="no MPICH: see `make launchers`")
def test_the_second_job_of_a_pbs_chain_continues_the_first(
    config: Path, losses: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through Slurm's qsub, which reads #PBS lines; a prolog sets the variables of PBS."""
    nodes, prolog = tmp_path / "nodes", tmp_path / "prolog"
    nodes.write_text("127.0.0.1\n")
    prolog.write_text(PROLOG.format(nodes=nodes))
    prolog.chmod(0o755)
    profile = tmp_path / "site.toml"
    path = f"export PATH={TOOLS / 'bin'}:$PATH"
    slow = '[ -d "${jobs%/jobs}/checkpoints" ] || export RECMILL_FAIL=train.step:slow'  # only the first job
    after = tomllib.loads((REPO / "configs" / "clusters" / "polaris.toml").read_text())["after"]
    values = {"launcher": "pbs", "procs": 2, "chunk": "ncpus=2", "mpi_options": ["-launcher", "fork"]}
    profile.write_text(tomli_w.dumps(values | {"setup": [path, slow], "after": after}), encoding="utf-8")
    with slurm_cluster(f"TaskProlog={prolog}") as variables:
        monkeypatch.setenv("SLURM_CONF", variables["SLURM_CONF"])
        run = tmp_path / "run"
        launched = launch(config, run, "--on", str(profile), "--chain", "2", "--time", "00:30:00")
        output = launched.communicate(timeout=120)[0]
        assert launched.returncode == 0, output
        first, second = [record.number for record in read_jobs(run / "jobs")]
        wait_until(lambda: has_saved(run), 120)
        subprocess.run(["scancel", "--batch", "--signal=TERM", first], check=True)
        wait_until(lambda: read_job_end(run / "jobs", second), 120)
    assert read_job_end(run / "jobs", first)["state"] == "preempted"
    assert read_job_end(run / "jobs", second)["state"] == "done"
    assert loss_by_step(run) == losses
    # Polaris' last line: one timeline of both jobs and both ranks
    events = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))["traceEvents"]
    steps = {(event["pid"], event["args"]["step"]) for event in events if event["name"] == "forward"}
    assert steps == {(rank, step) for rank in (0, 1) for step in range(1, 121)}


@needs_slurm
def test_a_cancelled_slurm_job_saves_and_does_not_come_back(
    config: Path, cluster: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster["SLURM_CONF"])
    run = tmp_path / "run"
    assert launch(config, run, "--on", "slurm", "--nodes", "2", **SLOW).wait(120) == 0
    wait_until(lambda: has_saved(run), 120)
    assert cancel(run) == [status(run).job]
    wait_until(lambda: status(run).state == "preempted", 60)
    shown = subprocess.run(["squeue", "-h", "-o", "%T"], capture_output=True, text=True, check=True).stdout
    assert "PENDING" not in shown
    assert "requeueing" not in "".join(logs(run))
    assert json.loads((run / "status.json").read_text())["reason"] == "SIGUSR2"
