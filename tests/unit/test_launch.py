"""`recmill launch`: what is checked before a job is queued, and that a dry run has no effects."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from recmill.commands.launch import launch
from recmill.config import load_config
from recmill.errors import ConfigError, ResourceError
from recmill.jobs.records import read_jobs
from tests.conftest import Config, RunCli


@pytest.fixture
def config(dlrm: Config, tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(dlrm), encoding="utf-8")
    return path


def test_a_dry_run_prints_the_script_and_imports_no_torch_and_writes_and_calls_nothing(
    config: Path, tmp_path: Path
) -> None:
    # As a user without permissions in that directory would, with nothing to call.
    code = "import sys; sys.modules['torch'] = sys.modules['polars'] = None; from recmill.__main__ import main; main()"
    command = [sys.executable, "-c", code, "launch", str(config), "--run", str(tmp_path / "run"), "--on", "slurm"]
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(
        [*command, "--nodes", "2", "--set", "train.seed=7", "--dry-run"],
        env={"PATH": "/nowhere", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "#SBATCH --nodes=2" in done.stdout
    assert f"{sys.executable} -P -m recmill train {tmp_path}/run/jobs/config.toml" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": ["train.sed=1"]}, "unknown key 'train.sed'"),
        ({"overrides": ["data.path=/nowhere"]}, "/nowhere"),
        ({"nodes": 100, "procs": 2}, "global_batch_size = 125, but 100 nodes with 2 processes each are 200 processes"),
        ({"overrides": ["train.stop_signals=[]"]}, "lacks SIGUSR2, which slurm sends"),
        ({"run": "/tmp/a\nb"}, "--run .* contains a control character"),
        ({"on": "slum"}, "unknown launcher or profile 'slum'. Did you mean 'slurm'"),
        ({"chain": 3}, "'chain' is not read by launcher 'slurm', only by pbs"),
        ({"nodes": 0}, "'nodes': should be greater than 0"),
    ],
)
def test_what_would_fail_in_the_queue_is_refused_before(
    config: Path, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arguments = {"on": "slurm", "run": tmp_path / "run", **options}
    with pytest.raises(Exception, match=message) as caught:
        launch(config, arguments.pop("run"), **arguments)
    assert isinstance(caught.value, ConfigError) or "/nowhere" in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("optimizer", "options", "needed"),
    # 2,355 rows of 10**6 values: 9.42 GB, and with Adagrad's state twice as much; nodes of 10 GB can use 9.
    [
        ("rowwise_adagrad", {"nodes": 1}, "9.4"),
        ("rowwise_adagrad", {"nodes": 2}, ""),
        ("adagrad", {"nodes": 2}, "18.8"),
        ("adagrad", {"nodes": 3}, ""),
    ],
)
def test_tables_that_cannot_fit_in_the_memory_of_the_nodes_are_refused(
    optimizer: str, options: dict[str, Any], needed: str, config: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "site.toml"
    profile.write_text('launcher = "slurm"\nmemory_gb = 10\n', encoding="utf-8")
    overrides = ["model.embedding_dim=1000000", "model.bottom_mlp=[1000000]", f"optim.tables.name={optimizer}"]
    arguments: dict[str, Any] = {"on": str(profile), "overrides": overrides, "dry_run": True, **options}
    if not needed:
        assert launch(config, tmp_path / "run", **arguments).text
        return
    with pytest.raises(ResourceError, match=rf"The tables need at least {needed} GB .*, but can use .* x 10\.0 GB"):
        launch(config, tmp_path / "run", **arguments)


def test_tables_that_fit_together_but_not_on_a_process_are_refused_before_a_job_is_queued(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.75 GB, of which the largest table is 0.64: two processes of a machine of 1 GB can use 0.45 each."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho called > $0.called\n", encoding="utf-8")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    profile = tmp_path / "site.toml"
    profile.write_text('launcher = "slurm"\nmemory_gb = 1\nprocs = 2\n', encoding="utf-8")
    overrides = ["model.embedding_dim=80000", "model.bottom_mlp=[80000]", "train.global_batch_size=2"]
    with pytest.raises(ResourceError, match=r"process \d of 2 needs .* but can use 450.0 MB .* It fits with --set "):
        launch(config, tmp_path / "run", on=str(profile), overrides=overrides)
    assert not (tmp_path / "run").exists() and not (tmp_path / "sbatch.called").exists()


def test_data_that_only_the_nodes_see_is_not_looked_at(config: Path, tmp_path: Path) -> None:
    elsewhere = ["data.path=/nowhere"]
    assert launch(config, tmp_path / "run", on="slurm", overrides=elsewhere, data_elsewhere=True, dry_run=True).text


def test_the_config_and_the_script_of_a_job_are_kept_with_the_run_and_a_live_job_is_not_queued_twice(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for name, text in {"sbatch": "echo '7;cluster'", "squeue": "echo 'PENDING|Resources'"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    launched = launch(config, run, on="slurm", overrides=["train.seed=7"])
    assert [(record.id, record.cluster) for record in read_jobs(run / "jobs")] == [("7", "cluster")]
    assert launched.records == read_jobs(run / "jobs")
    assert (run / "jobs" / "job.sh").read_text(encoding="utf-8") == launched.text
    assert load_config(run / "jobs" / "config.toml").settings.train.seed == 7
    with pytest.raises(ResourceError, match="job 7 of this run is queued"):
        launch(config, run, on="slurm")


@pytest.mark.parametrize(("launcher", "program"), [("slurm", "sbatch"), ("pbs", "qsub"), ("kubernetes", "kubectl")])
def test_a_scheduler_that_is_not_here_is_named(
    launcher: str, program: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    place: dict[str, Any] = {"image": "i", "mounts": [f"disk:{tmp_path}"]} if launcher == "kubernetes" else {}
    with pytest.raises(ResourceError, match=f"{program} is not installed here"):
        launch(config, tmp_path / "run", on=launcher, **place)


def test_what_the_scheduler_refuses_is_shown(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ResourceError, match=r"sbatch --test-only: .*invalid partition specified: x"):
        launch(config, tmp_path / "run", on="slurm", queue="x")
    assert not (tmp_path / "run").exists()


def test_a_job_that_cannot_be_noted_is_stopped(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the disk is full: nobody would know of the job."""
    stopped = tmp_path / "stopped"
    programs = {"sbatch": "echo 7", "squeue": "echo 'RUNNING|None'", "scancel": f"echo $@ > {stopped}"}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "run" / "jobs" / "jobs.jsonl").mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        launch(config, tmp_path / "run", on="slurm")
    assert stopped.read_text() == "7\n"


def test_jobs_of_a_chain_wait_for_the_one_before_to_end_unfinished(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    (tmp_path / "qsub").write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho "$(grep -c . {calls}).server"\n')
    (tmp_path / "qsub").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    launched = launch(config, tmp_path / "run", on="pbs", chain=3)
    script = f"{tmp_path}/run/jobs/job.sh"
    assert calls.read_text().splitlines() == [
        script,
        f"-W depend=afternotok:1.server {script}",
        f"-W depend=afternotok:2.server {script}",
    ]
    assert [record.number for record in launched.records] == ["1", "2", "3"]


def test_the_environment_of_the_login_shell_is_not_kept(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PBS_JOBCOOKIE", "s3cret")
    (tmp_path / "qsub").write_text("#!/bin/sh\necho 1.server\n")
    (tmp_path / "qsub").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    launch(config, tmp_path / "run", on="pbs")
    kept = [file.read_text(encoding="utf-8") for file in (tmp_path / "run" / "jobs").iterdir()]
    assert len(kept) == 3
    assert not any("s3cret" in text for text in kept)


def test_mpi_on_several_nodes_is_started_once_and_from_here(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli
) -> None:
    (tmp_path / "mpiexec").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n', encoding="utf-8")
    (tmp_path / "mpiexec").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    profile = tmp_path / "site.toml"
    profile.write_text('launcher = "mpi"\nnodes = 2\nhosts = ["a", "b"]\n', encoding="utf-8")
    done = run_cli("launch", str(config), "--run", str(tmp_path / "run"), "--on", str(profile))
    assert "recmill train" in (tmp_path / "called").read_text(encoding="utf-8"), done.stderr
