"""Scripts and manifests of jobs: exact texts, and no value that escapes from its quotes."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recmill.errors import ConfigError
from recmill.jobs.place import LAUNCHERS, Place, check_text, read_place
from recmill.jobs.scripts import Job, render

from ..processes import wait_until

REPO = Path(__file__).parents[2]
TEXTS = Path(__file__).parent / "job_scripts"
MOUNTS = {"image": "registry.example/recmill:1", "mounts": ["disk:/data"]}
POLARIS = tomllib.loads((REPO / "configs" / "clusters" / "polaris.toml").read_text(encoding="utf-8"))
SITE = {"setup": ["module load conda"], "after": ["date"], "env": {"NCCL_DEBUG": "it's $(date)"}, "time": "1-02:00:00"}
SLURM: dict[str, Any] = {"account": "a1", "queue": "gpu", "gpus": 4, "memory_gb": 100, "directives": ["--qos=high"]}
FULL = {"nodes": 2, "procs": 4, "cpus": 8}
PLACES: dict[str, dict[str, Any]] = {
    "slurm.sh": {"launcher": "slurm", "nodes": 2},
    "slurm-full.sh": {"launcher": "slurm", **FULL, **SITE, **SLURM},
    "polaris.sh": {**POLARIS, "nodes": 2, "time": "01:00:00", "account": "project"},
    "mpich.sh": {"launcher": "mpi", "procs": 2},
    "openmpi.sh": {"launcher": "mpi", "mpi": "openmpi", **FULL, "hosts": ["a", "b"], "env": {"A": "b"}},
    "local.sh": {"launcher": "local", "procs": 2, "env": {"A": "b c"}},
    "torchrun.sh": {"launcher": "torchrun", "nodes": 2, "procs": 2, "hosts": ["a", "b"]},
    "torchx.sh": {"launcher": "torchx", **FULL, "scheduler": "slurm"},
    "job.json": {"launcher": "kubernetes", **FULL, **MOUNTS, "time": "01:00:00", "queue": "q", "namespace": "n"},
    "jobset.json": {"launcher": "kubernetes", **FULL, **MOUNTS, "kind": "jobset", "gpus": 4, "memory_gb": 100},
    "trainjob.json": {"launcher": "kubernetes", **FULL, **MOUNTS, "kind": "trainjob", "env": {"A": "b"}},
}


def job(run: str, keys: dict[str, Any], *arguments: str) -> Job:
    return Job(Path(run), Place(**keys), "/env/bin/python", arguments, "[data]\npath = 'd'\n")


@pytest.mark.parametrize("name", PLACES)
def test_a_job_renders_as_exactly_this_text(name: str) -> None:
    text = render(job("/data/Run's 5%", PLACES[name], "--init-from", "/data/$(old)"))
    text = text.replace(str(REPO), "REPO")
    file = TEXTS / name
    if os.environ.get("RECMILL_WRITE_JOB_SCRIPTS"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8"), "RECMILL_WRITE_JOB_SCRIPTS=1 writes the new text; then read it"


@pytest.mark.parametrize("name", [name for name in PLACES if name.endswith(".sh")])
def test_a_script_is_valid_shell(name: str) -> None:
    script = TEXTS / name
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    if shutil.which("shellcheck"):  # SC2155: where a command fails, its value is empty
        done = subprocess.run(
            ["shellcheck", "-S", "warning", "-e", "SC2155", script], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_has_a_text(launcher: str) -> None:
    assert launcher in {keys["launcher"] for keys in PLACES.values()}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"launcher": "slurm", "image": "x"}, "'image' is not read by launcher 'slurm', only by kubernetes and torchx"),
        ({"launcher": "slurm", "quue": "x"}, "unknown key 'quue'. Did you mean 'queue'?"),
        ({"launcher": "slum"}, "'launcher': unknown value 'slum'. Did you mean 'slurm'?"),
        ({"launcher": "slurm", "queue": "gpu\n#SBATCH --uid=0"}, "'queue': .* letters, digits"),
        ({"launcher": "slurm", "account": "--uid=0"}, "'account': .* letters, digits"),
        ({"launcher": "slurm", "directives": ["--qos=a\nreboot"]}, r"'directives\[0\]' contains a control character"),
        ({"launcher": "pbs", "env": {"A B": "c"}}, "'A B' is not the name of an environment variable"),
        ({"launcher": "pbs", "env": {"WANDB_API_KEY": "c"}}, "'env.WANDB_API_KEY' looks like a secret"),
        ({"launcher": "pbs", "env": {"PROXY": "http://me:pw@host"}}, "'env.PROXY' looks like a secret"),
        ({"launcher": "pbs", "time": "2 hours"}, "'time': '2 hours' is not a time like 02:00:00"),
        ({"launcher": "pbs", "time": "00:01:00"}, "'time': 00:01:00 must be longer than warning_seconds = 120"),
        ({"launcher": "mpi", "nodes": 2}, "'hosts': the profile lists 0 hosts for 2 nodes"),
        ({"launcher": "kubernetes"}, "Kubernetes needs an image that has Recmill, and a volume"),
        (
            {"launcher": "kubernetes", "image": "i", "mounts": ["disk"]},
            "'mounts': 'disk' is not of the form CLAIM:/path",
        ),
        ({"launcher": "slurm", "nodes": 0}, "'nodes': should be greater than 0, got 0"),
    ],
)
def test_a_wrong_profile_is_described(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    profile = tmp_path / "site.toml"
    profile.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_place(str(profile), keys, tmp_path)


def test_a_profile_is_found_by_name_and_flags_override_it(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('launcher = "slurm"\nnodes = 3\nprocs = 2\n', encoding="utf-8")
    found = read_place("mine", {"nodes": 5}, tmp_path)
    assert (found.launcher, found.nodes, found.procs, found.size) == ("slurm", 5, 2, 10)
    with pytest.raises(ConfigError, match=r"unknown launcher or profile 'mne'\. Did you mean 'mine'\?"):
        read_place("mne", {}, tmp_path)


def test_the_shipped_profiles_are_valid() -> None:
    for file in (REPO / "configs" / "clusters").glob("*.toml"):
        assert read_place(str(file), {}, Path("/nowhere")).nodes
    assert read_place("polaris", {}, Path("/nowhere")).mpi == "pals"


def test_pods_must_see_the_run() -> None:
    with pytest.raises(ConfigError, match=r"--run /runs/a is in none of the mounts \(/data\)"):
        render(job("/runs/a", PLACES["job.json"]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Run's 5%", "recmill-run-s-5"), ("дата", "recmill"), ("A_b" * 40, "recmill-" + "a-b" * 13 + "a")],
)
def test_a_job_has_a_name_that_every_scheduler_accepts(name: str, expected: str) -> None:
    assert job(f"/data/{name}", PLACES["slurm.sh"]).name == expected


SHIM = """#!/bin/sh
printf '%s\\0' "$@" > "$RECORD"
env -0 > "$RECORD.env"
"""
ODD = st.text(
    st.sampled_from("ab \n\t'\"`$(){};&|<>#%\\*?~!,=-дö\u2028\udc80\x00\x1b"), min_size=1, max_size=12
) | st.sampled_from(
    ["$(touch marker)", "`touch marker`", "';touch marker;'", '"; touch marker; "', "a\n#SBATCH --uid=0\ntouch marker"]
)


# 200 cases in `make test`; more with: HYPOTHESIS_MAX_EXAMPLES=2000 pytest tests/unit/test_job_scripts.py -k odd
@settings(
    max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "200")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(run_name=ODD, argument=ODD, value=ODD)
def test_odd_characters_arrive_exactly_or_are_refused(run_name: str, argument: str, value: str, tmp_path: Path) -> None:
    try:
        profile = read_place("slurm", {"nodes": 2, "env": {"ODD": value}}, tmp_path)
        for text in (run_name, argument):
            check_text("--run", text)
    except ConfigError:
        return
    if "/" in run_name or run_name in (".", ".."):
        return
    shims = tmp_path / "shims"
    if not shims.exists():
        shims.mkdir()
        for name in ("srun", "scontrol", "python"):
            (shims / name).write_text(SHIM.replace("$RECORD", f"{tmp_path}/record-{name}"), encoding="utf-8")
            (shims / name).chmod(0o755)
    here = tmp_path / "runs"
    run = here / run_name
    (run / "jobs").mkdir(parents=True)
    text = render(Job(run, profile, str(shims / "python"), (argument,)))
    (output,) = [line for line in text.splitlines() if line.startswith("#SBATCH --output=")]
    assert shlex.split(output.removeprefix("#SBATCH ")) == [f"--output={str(run).replace('%', '%%')}/jobs/%j.out"]
    assert sum(line.startswith("#SBATCH") for line in text.splitlines()) == 7
    subprocess.run(
        ["bash", "-c", text],
        env={
            "PATH": f"{shims}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n",
            "LANG": "C.UTF-8",
        },
        stderr=subprocess.DEVNULL,
        check=True,
    )
    words = (tmp_path / "record-srun").read_bytes().decode().split("\0")[:-1]
    assert words[-5:] == ["train", f"{run}/jobs/config.toml", "--run-dir", str(run), argument]
    assert f"ODD={value}".encode() in (tmp_path / "record-srun.env").read_bytes().split(b"\0")
    assert sorted(path.name for path in (run / "jobs").iterdir()) == ["7.errors"]
    assert not list(tmp_path.rglob("marker"))
    shutil.rmtree(here)


MPIEXEC = """#!/bin/bash
trap 'exit 75' USR1
trap 'exit 99' TERM
env > record.env
echo ready
for _ in {1..60}; do read -t 1 <> <(:); done
"""


def test_a_pbs_script_knows_its_end_and_size_and_hands_a_signal_to_its_ranks(tmp_path: Path) -> None:
    """PBS sends no warning, PALS tells no size, and bash runs no trap while a program is in front."""
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    (tmp_path / "nodes").write_text("n1\nn2\n", encoding="utf-8")
    for name, text in (("mpiexec", MPIEXEC), ("python", '#!/bin/sh\necho "$@" > finish\nexit 75\n')):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    place = Place(**POLARIS | {"setup": [], "nodes": 2, "time": "01:00:00", "account": "a"})
    text = render(Job(tmp_path / "run", place, str(tmp_path / "python")))
    assert "\n#PBS -r y\n" in text
    jobs = tmp_path / "run" / "jobs"
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PBS_JOBID": "7.s", "PBS_NODEFILE": f"{tmp_path}/nodes"}
    before = int(time.time())
    with subprocess.Popen(["bash", "-c", text], env=variables) as script:
        wait_until(lambda: (jobs / "7.out").exists() and "ready" in (jobs / "7.out").read_text(), 60)
        after = time.time()
        script.send_signal(signal.SIGTERM)
        assert script.wait(60) == 75
    found = dict(line.split("=", 1) for line in (jobs / "record.env").read_text().splitlines() if "=" in line)
    assert before + 3600 - 120 <= int(found["RECMILL_DEADLINE"]) <= after + 3600 - 120
    assert found["RECMILL_WORLD_SIZE"] == "8"
    assert (jobs / "finish").read_text().split()[4:6] == ["7", "75"]


def test_slurm_warns_the_tasks_not_the_script() -> None:
    assert "\n#SBATCH --signal=USR2@120\n" in render(job("/data/a", PLACES["slurm.sh"]))  # not B:USR2


def test_kubernetes_expands_nothing_in_arguments() -> None:
    manifests = json.loads(render(job("/data/a", PLACES["job.json"], "$(HOME)")))
    (container,) = manifests["items"][2]["spec"]["template"]["spec"]["containers"]
    assert "$$(HOME)" in container["args"]


@pytest.mark.parametrize("name", [name for name in PLACES if name.endswith(".json")])
def test_manifests_have_only_the_fields_of_the_published_schemas(name: str) -> None:
    from kubeflow_trainer_api import models

    kinds = {
        "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
        "Service": models.IoK8sApiCoreV1Service,
        "Job": models.IoK8sApiBatchV1Job,
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }
    for manifest in json.loads((TEXTS / name).read_text(encoding="utf-8"))["items"]:
        assert kinds[manifest["kind"]].from_dict(manifest).to_dict() == manifest  # unknown fields are dropped
