"""What env.json may hold, and what not."""

import json
import os
from pathlib import Path

import recmill
from recmill.environment import recorded_variables
from recmill.observe.provenance import by_host, file_system

from ..conftest import Config
from ..group import in_group

SECRET = "hunter2-planted"
PLANTED = {
    **dict.fromkeys(
        ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY", "HF_TOKEN", "GITHUB_TOKEN"), SECRET
    ),
    **dict.fromkeys(
        ("PBS_JOBCOOKIE", "PMI_SHARED_SECRET", "SLURM_JWT", "KUBECONFIG", "DATABASE_URL", "PGPASSWORD"), SECRET
    ),
    **dict.fromkeys(("RECMILL_TOKEN", "RECMILL_API_KEY", "TORCH_AUTH", "PYTORCH_PASSPHRASE", "NCCL_SECRET"), SECRET),
    **dict.fromkeys(("OMP_Session", "MKL_LICENSE_KEY", "FI_CREDENTIALS", "MPICH_COOKIE", "PALS_AUTH_FILE"), SECRET),
    **dict.fromkeys(("SLURM_JOB_COMMENT", "SLURM_JOB_ACCOUNT", "PBS_ENVIRONMENT", "PALS_PRIVATE_ID"), SECRET),
    "GLOO_PROXY": f"http://user:{SECRET}@proxy",
    "NCCL_PROXY": f"http://{SECRET}@proxy",
    "DFTRACER_UPLOAD": f"Bearer {SECRET}",
    "TORCH_HEADER": f"Authorization: {SECRET}",
    "RECMILL_EXTRA": f"token={SECRET}",
}


def train_with_secrets(config: Config, run: Path) -> None:
    os.environ |= PLANTED | {"GOMP_SPINCOUNT": "123"}
    recmill.train(config, run)


def test_no_planted_secret_is_kept_with_a_run(dlrm: Config, tmp_path: Path) -> None:
    assert len(PLANTED) == 30
    dlrm["train"]["max_steps"] = 2
    in_group(2, train_with_secrets, dlrm, tmp_path / "run")
    leaking = [
        path for path in (tmp_path / "run").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert leaking == []
    facts = json.loads((tmp_path / "run" / "env.json").read_text())
    assert facts["variables"]["GOMP_SPINCOUNT"] == "123"
    (host,) = facts["hosts"]
    assert host["ranks"] == [0, 1]
    assert host["file_systems"].keys() == {"dataset", "run"}
    assert host["cores"] >= 1


def test_the_variables_of_threads_networks_and_jobs_are_kept() -> None:
    kept = {"OMP_NUM_THREADS": "4", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "8"}
    kept |= {"PBS_JOBID": "7.node", "PMI_LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"}
    internal = {"RECMILL_STORE_FD": "5", "RECMILL_JOB": "/tmp/job", "RECMILL_LAUNCHER": "7", "RECMILL_ATTEMPT": "0"}
    assert (
        recorded_variables({**kept, **internal, **PLANTED, "HOME": "/home/me", "PATH": "/bin", "PBS_O_PATH": "/x"})
        == kept
    )


def test_the_type_of_a_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 0:30 / /lus/eagle rw - lustre 10.0.0.1@o2ib:/eagle rw\n"
        "24 22 0:31 / /my\\040data rw - nfs4 server:/x rw\n"
    )
    found = [file_system(Path(path), mounts) for path in ("/lus/eagle/data", "/lus/eagles", "/my data/x", "/")]
    assert found == ["lustre", "ext4", "nfs4", "ext4"]
    assert file_system(Path("/"), tmp_path / "missing") == ""


def test_hosts_are_listed_once_with_their_ranks_and_gpus() -> None:
    facts = [{"name": name, "cores": 4, "gpu": {"name": f"gpu {name}"}} for name in ("a", "b", "a")]
    assert by_host(facts) == [
        {"name": "a", "cores": 4, "ranks": [0, 2], "gpus": [{"name": "gpu a"}] * 2},
        {"name": "b", "cores": 4, "ranks": [1], "gpus": [{"name": "gpu b"}]},
    ]
