"""Scripts and manifests of jobs: exact texts, and no value that escapes from its quotes."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import Template
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
    "pbs.sh": {"launcher": "pbs", **FULL, "memory_gb": 100, "chain": 2, "mpi": "openmpi"},
    "polaris.sh": {**POLARIS, "nodes": 2, "time": "01:00:00", "account": "project"},
    "mpich.sh": {"launcher": "mpi", "procs": 2},
    "openmpi.sh": {"launcher": "mpi", "mpi": "openmpi", **FULL, "hosts": ["a", "b"], "env": {"A": "b"}},
    "local.sh": {"launcher": "local", "procs": 2, "env": {"A": "b c"}},
    "torchrun.sh": {"launcher": "torchrun", "nodes": 2, "procs": 2, "hosts": ["a", "b"]},
    "torchx.sh": {"launcher": "torchx", **FULL, "scheduler": "slurm", "queue": "gpu"},
    "torchx-kubernetes.sh": {"launcher": "torchx", **FULL, **MOUNTS, "scheduler": "kubernetes", "queue": "default"},
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
        (
            {"launcher": "torchx", "scheduler": "kubernetes", **MOUNTS},
            "'queue': torchx on Kubernetes needs a",
        ),
        ({"launcher": "torchx", "scheduler": "kubernetes", "queue": "q"}, "'image' and 'mounts'"),
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
    [("Run's 5%", "recmill-run-s-5"), ("дата", "recmill"), ("A_b" * 40, "recmill-" + "a-b" * 10 + "a")],
)
def test_a_job_has_a_name_that_every_scheduler_accepts(name: str, expected: str) -> None:
    assert job(f"/data/{name}", PLACES["slurm.sh"]).name == expected


def test_runs_of_the_same_directory_name_have_different_names_in_kubernetes() -> None:
    names = {job(f"/data/{folder}/{'A_b' * 40}", PLACES["jobset.json"]).name for folder in ("one", "two")}
    assert len(names) == 2
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) for name in names)
    assert all(len(f"{name}-node-0-999-abcde") <= 63 for name in names)  # a pod's


SHIM = """#!/bin/sh
[ -e RECORD ] && exit 0
printf '%s\\0' "$@" > RECORD.new
env -0 > RECORD.env
mv RECORD.new RECORD
"""
ODD = st.text(
    st.sampled_from("ab \n\t'\"`$(){};&|<>#%\\*?~!,=-дö\u2028\udc80\x00\x1b"), min_size=1, max_size=12
) | st.sampled_from(
    [
        *("$(touch marker)", "`touch marker`", "';touch marker;'", '"; touch marker; "', "--args", "-x"),
        *("a\n#SBATCH --uid=0\ntouch marker", "$(HOME)", "$$(HOME)", "a$$b", "${app_id}", "$app_id", "$local_rank"),
    ]
)
# Launcher, and the program that it starts the ranks with.
STARTED_BY: dict[str, tuple[dict[str, Any], str]] = {
    "slurm": ({"launcher": "slurm", "nodes": 2}, "srun"),
    "pbs": ({"launcher": "pbs", "nodes": 2}, "mpiexec"),
    "mpich": ({"launcher": "mpi"}, "mpiexec"),
    "openmpi": ({"launcher": "mpi", "mpi": "openmpi"}, "mpirun"),
    "local": ({"launcher": "local"}, "python"),
    "torchrun": ({"launcher": "torchrun"}, "python"),
    "torchx": ({"launcher": "torchx"}, "torchx"),
}
# A few cases in `make test`; more with: HYPOTHESIS_MAX_EXAMPLES=2000 pytest tests/unit/test_job_scripts.py -k odd
ODD_CASES = settings(
    max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def odd_job(keys: dict[str, Any], run: Path, argument: str, value: str, python: str = "python") -> Job | None:
    """Return a job as `recmill launch` makes it; None if it refuses the values."""
    try:
        place = read_place(
            keys["launcher"], {**keys, **({} if keys["launcher"] == "torchx" else {"env": {"ODD": value}})}, run
        )
        for text in (str(run), argument):
            check_text("--run", text)
    except ConfigError:
        return None
    return Job(run, place, python, (argument,), "")


def called(program: str, folder: Path, command: list[str]) -> tuple[list[str], list[bytes]]:
    """Return the arguments and the variables with which a command calls a program first. Nothing real is called."""
    folder.mkdir(exist_ok=True)
    for name in ("srun", "scontrol", "mpiexec", "mpirun", "torchx", "torchrun", "python"):
        (folder / f"{name}.record").unlink(missing_ok=True)
        if not (folder / name).exists():
            (folder / name).write_text(SHIM.replace("RECORD", str(folder / f"{name}.record")), encoding="utf-8")
            (folder / name).chmod(0o755)
    (folder / "nodes").write_text("n1\n", encoding="utf-8")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "PBS_JOBID": "7", "PBS_NODEFILE": f"{folder}/nodes"}
    variables |= {"PATH": f"{folder}:{os.environ['PATH']}", "LANG": "C.UTF-8"}
    subprocess.run(command, env=variables, stderr=subprocess.DEVNULL, check=True)
    record = folder / f"{program}.record"
    return record.read_bytes().decode().split("\0")[:-1], Path(f"{record}.env").read_bytes().split(b"\0")


def torchx_command(words: list[str]) -> list[str]:
    """Return the command that torchx makes of our component with these arguments of `torchx run`."""
    if (tools := f"{sys.prefix}/launchers") not in sys.path:
        sys.path.append(tools)
    import torchx.specs

    component: dict[str, Any] = {}
    exec((REPO / "src/recmill/jobs/torchx_component.py").read_text(encoding="utf-8"), component)
    (first,) = [i for i, word in enumerate(words) if word.endswith("torchx_component.py:train")]
    options = dict(word.removeprefix("--").split("=", 1) for word in words[first + 1 :])
    (role,) = component["train"](**options).roles
    role = torchx.specs.macros.Values(img_root="", app_id="expanded", replica_id="0", rank0_env="HEAD").apply(role)
    return [role.entrypoint, *role.args]


def passed_on_by_torchrun(word: str) -> str:
    return Template(word).safe_substitute(local_rank="REPLACED")


@pytest.mark.parametrize("name", STARTED_BY)
@ODD_CASES
@given(run_name=ODD, argument=ODD, value=ODD)
def test_odd_characters_arrive_exactly_or_are_refused(
    name: str, run_name: str, argument: str, value: str, tmp_path: Path
) -> None:
    keys, program = STARTED_BY[name]
    here, shims = tmp_path / "runs", tmp_path / "shims"
    job = odd_job(keys, here / run_name, argument, value, str(shims / "python"))
    if job is None or "/" in run_name or run_name in (".", ".."):
        return
    job.jobs.mkdir(parents=True)
    text = render(job)
    words, variables = called(program, shims, ["bash", "-c", text])
    if name == "torchx":
        if not (Path(sys.prefix) / "launchers" / "torchx").is_dir():
            pytest.skip("no torchx: see `make launchers`")
        words, _ = called("torchrun", shims, torchx_command(words))
    else:
        assert f"ODD={value}".encode() in variables
    if name in ("torchrun", "torchx"):
        words = list(map(passed_on_by_torchrun, words))
    start = words.index("train")
    assert words[start : start + 5] == ["train", f"{job.jobs}/config.toml", "--run-dir", str(job.run), argument]
    kept = {"7.errors", "7.out"} if name == "pbs" else {"7.errors"}
    if name in ("slurm", "pbs"):
        assert {path.name for path in job.jobs.iterdir()} == kept
        assert sum(line.startswith(("#SBATCH", "#PBS")) for line in text.splitlines()) == (7 if name == "slurm" else 4)
    if name == "slurm":
        (output,) = [line for line in text.splitlines() if line.startswith("#SBATCH --output=")]
        assert shlex.split(output.removeprefix("#SBATCH ")) == [f"--output={str(job.jobs).replace('%', '%%')}/%j.out"]
    assert not list(tmp_path.rglob("marker"))
    shutil.rmtree(here)


def expanded(text: str) -> str:
    """Return what Kubernetes makes of an argument or variable: its `Expand`, with every variable known."""
    return re.sub(r"\$(\$|\([^)]*\))", lambda match: "$" if match[1] == "$" else "EXPANDED", text)


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@ODD_CASES
@given(run_name=ODD, argument=ODD, value=ODD)
def test_odd_characters_arrive_in_kubernetes_exactly_or_are_refused(
    kind: str, run_name: str, argument: str, value: str
) -> None:
    keys = {"launcher": "kubernetes", "kind": kind, **MOUNTS}
    job = odd_job(keys, Path("/data", run_name), argument, value)
    if job is None or "/" in run_name or run_name in (".", ".."):
        return
    *_, manifest = json.loads(render(job))["items"]
    found = [container for container in dictionaries(manifest) if "args" in container]
    (container,) = found
    words = list(map(expanded, container["args"]))
    if kind == "trainjob":
        words = list(map(passed_on_by_torchrun, words))
    start = words.index("train")
    assert words[start + 2 : start + 5] == ["--run-dir", str(job.run), argument]
    assert {"ODD": value}.items() <= {one["name"]: expanded(one["value"]) for one in container["env"]}.items()


def dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every dictionary in a JSON value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
        yield from dictionaries(inner)


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
    (jobs / "7.end.json").write_text("{}")  # of the start before, if the job was requeued
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
    assert not (jobs / "7.end.json").exists()


def test_a_job_whose_node_does_not_see_the_run_ends_with_one_clear_line(tmp_path: Path) -> None:
    text = render(job(f"{tmp_path}/not here", PLACES["slurm.sh"]))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"recmill: resource error: {tmp_path}/not here/jobs is not visible on ")
    assert last.endswith("Choose a --run on a shared disk.")


def test_slurm_warns_the_tasks_not_the_script() -> None:
    assert "\n#SBATCH --signal=USR2@120\n" in render(job("/data/a", PLACES["slurm.sh"]))  # not B:USR2


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
