import os
from dataclasses import astuple
from pathlib import Path

import pytest

from recmill.environment import (
    Node,
    job_id,
    launched_environment,
    max_processes,
    own_node,
    process_environment,
    rendezvous,
)
from recmill.errors import ConfigError

ALONE = Node(0, 1, "127.0.0.1", 0)
PAIR = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


@pytest.fixture(autouse=True)
def nobody_launched_this(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "RECMILL_", "JOB_")):
            monkeypatch.delenv(name)


def test_a_process_that_nobody_launched_is_rank_0_of_1() -> None:
    process = process_environment()
    assert (process.is_launched, process.rank, process.size, process.job) == (False, 0, 1, None)


def test_a_worker_reads_what_the_launcher_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        monkeypatch.delenv("RECMILL_STORE_FD", raising=False)
        for name, value in launched_environment(rank, 2, ALONE, tmp_path, 3, port=1234, store_descriptor=7).items():
            monkeypatch.setenv(name, value)
        process = process_environment()
        assert (process.rank, process.size, process.local_rank, process.local_size) == (rank, 2, rank, 2)
        assert (process.job, process.launcher, process.attempt) == (tmp_path, os.getpid(), 3)
        expected = ("127.0.0.1", 1234, rank == 0, 7 if rank == 0 else None, None)
        assert astuple(rendezvous()) == expected


def test_rank_0_serves_the_store_unless_torchrun_s_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**PAIR, "MASTER_ADDR": "h", "MASTER_PORT": "5"}.items():
        monkeypatch.setenv(name, value)
    assert rendezvous().is_server
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not rendezvous().is_server
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("RANK", "1")
    assert not rendezvous().is_server


def test_each_attempt_of_torchrun_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {**PAIR, "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "h"}
    for name, value in (torchrun | {"TORCHELASTIC_RESTART_COUNT": "2", "MASTER_PORT": "5"}).items():
        monkeypatch.setenv(name, value)
    assert process_environment().attempt == 2
    assert rendezvous().prefix == "recmill/2"


def test_variables_that_are_missing_or_no_numbers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "abc")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK = 'abc' is not a number"):
        process_environment()
    for name, value in PAIR.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="another launcher started 2 processes, but MASTER_ADDR is not set"):
        rendezvous()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("RANK=1", "RANK = '1', but WORLD_SIZE is not set"),
        ("WORLD_SIZE=2", "WORLD_SIZE = '2', but RANK is not set"),
        ("RANK=5 WORLD_SIZE=2", r"RANK = 5, but WORLD_SIZE = 2: ranks are 0 to 1\."),
        ("RANK=-1 WORLD_SIZE=2", "RANK = '-1' is not in 0"),
        ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE = '0' is not in 1"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1", "LOCAL_RANK = 1, but LOCAL_WORLD_SIZE = 1"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3", r"LOCAL_WORLD_SIZE = '3' is not in 1\.\.2"),
        ("RECMILL_JOB=/nowhere", "RECMILL_JOB is set, but RANK is not"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR= MASTER_PORT=5", "MASTER_ADDR is not set"),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a..b MASTER_PORT=5",
            r"MASTER_ADDR = 'a\.\.b' is not a name or an address",
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=h MASTER_PORT=70000",
            r"MASTER_PORT = '70000' is not in 1\.\.65535",
        ),
    ],
)
def test_contradictory_variables_are_named_with_their_values(
    variables: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(ConfigError, match=message):
        process_environment()
        rendezvous()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", None), ("SLURM_JOB_ID=5 SLURM_NTASKS=2", "5"), ("PBS_JOBID=7.server", "7.server"), ("PBS_JOBID=", None)],
)
def test_the_id_of_a_job_is_its_scheduler_s(text: str, expected: str | None) -> None:
    assert job_id(variables(text)) == expected


def test_a_machine_runs_up_to_4_processes_per_core_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (max_processes(2), max_processes(64)) == (16, 256)
    monkeypatch.setenv("RECMILL_MAX_PROCS", "3")
    assert max_processes(64) == 3


# Recorded from Open MPI 4.1.4, MPICH 5.0.2, Slurm 22.05.8 with two nodes, torchrun 2.13; PALS and Kubeflow: documented.
OPEN_MPI = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
MPICH = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_FD=10"
PALS = "PALS_RANKID=5 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=4 PALS_NODEID=1"
SLURM_JOB = "SLURM_JOB_ID=5 SLURM_JOB_NUM_NODES=2 SLURM_NTASKS=2 SLURM_NPROCS=2 SLURM_TASKS_PER_NODE=1(x2)"
BATCH_SCRIPT = f"{SLURM_JOB} SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0"
STEP = f"{SLURM_JOB} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_LOCALID=0"
STEP_OF_4 = "SLURM_PROCID=3 SLURM_NODEID=1 SLURM_LOCALID=1 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2)"
ONE_TASK = "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_NTASKS=1"
TORCHRUN = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 TORCHELASTIC_RUN_ID=5"
PYTORCH_JOB = "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456"


def variables(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in text.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("", 0, 1, 0, 1)),
        (OPEN_MPI, ("Open MPI", 1, 2, 1, 2)),
        (MPICH, ("MPICH", 1, 2, 1, 2)),
        (f"{PALS} PMI_RANK=5 PMI_SIZE=8", ("PALS", 5, 8, 1, 4)),  # Polaris
        (f"{PALS} RECMILL_WORLD_SIZE=8", ("PALS", 5, 8, 1, 4)),  # Aurora, whose PALS sets no size
        ("PMI_RANK=3 PMI_SIZE=4 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2", ("MPI", 3, 4, 1, 2)),
        (f"{STEP} SLURM_PROCID=1 SLURM_NODEID=1", ("Slurm", 1, 2, 0, 1)),
        (STEP_OF_4, ("Slurm", 3, 4, 1, 2)),
        (f"{STEP} SLURM_PROCID=1 SLURM_NODEID=1 PMI_RANK=1 PMI_SIZE=2", ("Slurm", 1, 2, 0, 1)),  # srun --mpi=pmi2
        (SLURM_JOB, ("", 0, 1, 0, 1)),  # the shell of salloc
        (ONE_TASK, ("", 0, 1, 0, 1)),  # srun --pty bash
        (TORCHRUN, ("torchrun", 1, 2, 0, 1)),
        (f"{TORCHRUN} {STEP} SLURM_PROCID=0 SLURM_NODEID=0", ("torchrun", 1, 2, 0, 1)),  # its ranks are not srun's
        (f"{OPEN_MPI} {BATCH_SCRIPT}", ("Open MPI", 1, 2, 1, 2)),  # mpirun on the first node of a job
        (f"{OPEN_MPI} {STEP} SLURM_PROCID=0 SLURM_NODEID=0", ("Open MPI", 1, 2, 1, 2)),  # its daemons are tasks
        (f"{MPICH} {STEP} SLURM_PROCID=0 SLURM_NODEID=0", ("MPICH", 1, 2, 1, 2)),
        (f"{OPEN_MPI} RANK=1 WORLD_SIZE=2", ("Open MPI", 1, 2, 1, 2)),  # a script maps one to the other
        (f"{MPICH} RANK=1 WORLD_SIZE=2 LOCAL_RANK=0", ("MPICH", 1, 2, 0, 2)),
        (f"{PYTORCH_JOB} LOCAL_WORLD_SIZE=1", ("another launcher", 1, 2, 0, 1)),
        ("RANK=0 WORLD_SIZE=1", ("another launcher", 0, 1, 0, 1)),
    ],
)
def test_a_process_finds_its_place_from_the_variables_of_each_launcher(
    text: str, expected: tuple[str, int, int, int, int]
) -> None:
    assert astuple(process_environment(variables(text)))[:5] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BATCH_SCRIPT, "This Slurm job has 2 tasks, but its batch script started this process, .* with srun"),
        (PYTORCH_JOB, "RANK = 1 of 2, but neither LOCAL_RANK nor LOCAL_WORLD_SIZE is set.*LOCAL_WORLD_SIZE=1"),
        (PALS, "PALS started this process, but RECMILL_WORLD_SIZE is not set"),
        (f"{PALS} PMI_SIZE=8 RECMILL_WORLD_SIZE=16", r"16 processes were asked for .* PALS started 8"),
        (f"{STEP} SLURM_PROCID=1 SLURM_NODEID=1 RECMILL_WORLD_SIZE=1", "1 processes were asked for .* Slurm started 2"),
        ("RECMILL_WORLD_SIZE=8", "8 processes were asked for .*, but no launcher's variables are set here"),
        (f"{ONE_TASK} RECMILL_WORLD_SIZE=8", "8 processes were asked for"),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4",
            "RANK = 0 and WORLD_SIZE = 2, but MPICH says PMI_RANK = 1 and PMI_SIZE = 4. Unset RANK",
        ),
        (f"RANK=0 WORLD_SIZE=1 {STEP} SLURM_PROCID=1 SLURM_NODEID=1", "but Slurm says SLURM_PROCID = 1"),
        (STEP_OF_4.replace("2(x2)", "2(x1)"), r"SLURM_STEP_TASKS_PER_NODE = '2\(x1\)' does not hold 4 tasks"),
        (STEP_OF_4.replace("2(x2)", "2,1(x2)"), "different numbers of tasks on the nodes .* --ntasks-per-node"),
        (OPEN_MPI.replace("SIZE=2", "SIZE=1"), "OMPI_COMM_WORLD_RANK = 1, but OMPI_COMM_WORLD_SIZE = 1"),
    ],
)
def test_a_process_that_cannot_be_sure_of_its_place_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        process_environment(variables(text))


def test_the_workers_of_several_machines_have_consecutive_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert own_node() == ALONE
    monkeypatch.setenv("RECMILL_NODES", "2")
    with pytest.raises(ConfigError, match="RECMILL_NODES = 2, but RECMILL_NODE_RANK is not set"):
        own_node()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")  # of a Kubernetes pod
    with pytest.raises(ConfigError, match="RECMILL_NODES = 2, but MASTER_ADDR is not set"):
        own_node()
    monkeypatch.setenv("MASTER_ADDR", "head")
    monkeypatch.setenv("MASTER_PORT", "5")
    node = own_node()
    assert astuple(node) == (1, 2, "head", 5)
    worker = launched_environment(1, 3, node, tmp_path, 0, node.port, None)
    assert astuple(process_environment(worker))[:5] == ("recmill", 4, 6, 1, 3)
    monkeypatch.setenv("RECMILL_NODE_RANK", "2")
    with pytest.raises(ConfigError, match="RECMILL_NODE_RANK = 2, but RECMILL_NODES = 2: ranks are 0 to 1"):
        own_node()


def test_requeues_of_a_slurm_job_count_as_restarts() -> None:
    assert process_environment(variables(f"{STEP_OF_4} SLURM_RESTART_COUNT=2")).attempt == 2
