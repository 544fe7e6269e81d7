import os
from dataclasses import astuple
from pathlib import Path

import pytest

from recmill.environment import launched_environment, max_processes, process_environment, rendezvous
from recmill.errors import ConfigError


@pytest.fixture(autouse=True)
def nobody_launched_this(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_that_nobody_launched_is_rank_0_of_1() -> None:
    process = process_environment()
    assert (process.is_launched, process.rank, process.size, process.job) == (False, 0, 1, None)


def test_a_worker_reads_what_the_launcher_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        monkeypatch.delenv("RECMILL_STORE_FD", raising=False)
        for name, value in launched_environment(rank, 2, tmp_path, 3, port=1234, store_descriptor=7).items():
            monkeypatch.setenv(name, value)
        process = process_environment()
        assert (process.rank, process.size, process.local_rank, process.local_size) == (rank, 2, rank, 2)
        assert (process.job, process.launcher, process.attempt) == (tmp_path, os.getpid(), 3)
        expected = ("127.0.0.1", 1234, rank == 0, 7 if rank == 0 else None, None)
        assert astuple(rendezvous()) == expected


def test_rank_0_serves_the_store_unless_torchrun_s_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}.items():
        monkeypatch.setenv(name, value)
    assert rendezvous().is_server
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not rendezvous().is_server
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.setenv("RANK", "1")
    assert not rendezvous().is_server


def test_each_attempt_of_torchrun_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "h"}
    for name, value in (torchrun | {"TORCHELASTIC_RESTART_COUNT": "2", "MASTER_PORT": "5"}).items():
        monkeypatch.setenv(name, value)
    assert process_environment().attempt == 2
    assert rendezvous().prefix == "recmill/2"


def test_variables_that_are_missing_or_no_numbers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "abc")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK = 'abc' is not a number"):
        process_environment()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
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
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR= MASTER_PORT=5", "MASTER_ADDR is not set"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a..b MASTER_PORT=5", r"MASTER_ADDR = 'a\.\.b' is not a name or an address"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=h MASTER_PORT=70000", r"MASTER_PORT = '70000' is not in 1\.\.65535"),
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


def test_a_machine_runs_up_to_4_processes_per_core_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (max_processes(2), max_processes(64)) == (16, 256)
    monkeypatch.setenv("RECMILL_MAX_PROCS", "3")
    assert max_processes(64) == 3
