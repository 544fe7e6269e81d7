"""The same run for any world size and any sharding."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
import torch.distributed as dist

from recmill import rng, world
from recmill.commands.assemble import build_source, model_module, task_module
from recmill.config import load_config
from recmill.data.opening import open_dataset
from recmill.errors import ConfigError, LostPeerError, ResourceError
from recmill.launch.signals import stop_with_parent
from recmill.tables.spec import TableSpec

from ..group import evaluate, train
from ..processes import free_port
from .runs import assert_same_run, close_to, losses


@pytest.mark.parametrize("model", ["dlrm", "bert4rec", "sasrec", "esasrec"])
def test_any_number_of_processes_gives_the_same_losses_and_metrics(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = request.getfixturevalue(model)
    sizes = (1, 3) if model == "bert4rec" else (1, 2)
    results = [train(config, tmp_path / str(procs), procs=procs) for procs in sizes]
    assert len(losses(tmp_path / "1")) > 4
    first, *later, before_last, _ = losses(tmp_path / "1")  # the last batch may be a single row
    # A batch of histories has rows of like length, and losses of different lengths are hard to compare.
    assert (before_last if model == "dlrm" else min(later)) < first
    assert_same_run(tmp_path / "1", tmp_path / str(sizes[1]))
    for split in ("val", "test"):
        assert results[1][split] == close_to(results[0][split])
    if model == "dlrm":  # the metrics of one checkpoint, summed over one rank and over two
        one, two = (evaluate(tmp_path / "1", split="val", procs=procs, bootstrap=20) for procs in (1, 2))
        assert two == close_to(one, rel=1e-6)
        assert {name: two[name] for name in results[0]["val"]} == close_to(results[0]["val"], rel=1e-6)
        assert one["low/auroc"] < one["auroc"] < one["high/auroc"]


def test_all_that_ranking_has_is_the_same_for_one_and_two_processes(sasrec: dict[str, Any], tmp_path: Path) -> None:
    results = train(sasrec, tmp_path / "run", overrides=["train.max_steps=3", "eval.bootstrap=20"])
    trained, tested = results["val"], results["test"]
    assert {name for name in tested if f"low/{name}" in tested} == {name for name in trained if "@" in name}
    asked: dict[str, Any] = {"protocols": ["uni30", "full", "pop100"], "ks": [3, 10], "bootstrap": 200}
    one, two = (evaluate(tmp_path / "run", split="val", procs=procs, **asked) for procs in (1, 2))
    assert len(one) == 4 * 18 + 3  # values, both ends of intervals, popularity; users, step, checkpoint
    assert two == one
    shared = one.keys() & trained.keys()
    assert len(shared) == 9
    assert {name: one[name] for name in shared} == {name: trained[name] for name in shared}


@pytest.mark.parametrize(
    "model", ["dlrm", "dcnv2", "projection", "bert4rec", "sasrec", "gsasrec", "esasrec", "two_tower"]
)
def test_two_sharded_processes_equal_plain_torch(model: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The reference: an unsharded network, torch's own SGD on everything, one process, no launcher.

    test_sharding.py shows the same for the other ways to shard tables.
    """
    config = request.getfixturevalue(model)
    config["optim"] = {"dense": {"name": "sgd", "lr": 0.1}, "tables": {"name": "sgd", "lr": 0.1}}
    config["train"]["max_steps"] = 6
    train(config, tmp_path / "run", procs=2, overrides=["sharding.default=row_wise"])
    assert losses(tmp_path / "run") == pytest.approx(plain_losses(config, steps=6), rel=2e-5)


def plain_losses(values: dict[str, Any], steps: int) -> list[float]:
    config = load_config(values)
    dataset = open_dataset(config.settings.data.path)
    module, task = model_module(config), task_module(config)
    torch.manual_seed(config.settings.train.seed)
    network = module.build(config.model, dataset.description, torch.device("meta"))
    give_tables_memory(network, module.tables(config.model, dataset.description), config.settings.train.seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    out = []
    for _, batch in zip(range(steps), build_source(config, dataset, rank=0, size=1).train_batches(0, 0), strict=False):
        loss = task.loss_sum(network, batch) / batch.weight()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(float(loss.detach()))
    return out


def give_tables_memory(network: torch.nn.Module, tables: list[TableSpec], seed: int) -> None:
    """Ordinary parameters, by the documented formula: stream (seed, table), value number row * dim + column."""
    for table in tables:
        key = rng.stream_key(seed, "table", table.name)
        values = rng.uniform_floats(key, 0, table.rows * table.dim, table.init_bound).reshape(table.rows, table.dim)
        (holder,) = [module for name, module in network.named_modules() if name.endswith(f".{table.name}")]
        holder.weight = torch.nn.Parameter(torch.from_numpy(values.copy()))


def start_rank(rank: int, port: int, config: dict[str, Any], folder: Path, fail: str = "") -> "subprocess.Popen[str]":
    """Start one of two processes by hand, without a launcher."""
    (folder / "run.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", "recmill", "train", str(folder / "run.toml"), "--run", str(folder / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "RECMILL_FAIL": fail},
        preexec_fn=stop_with_parent,
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_for_others_is_announced_and_a_signal_ends_it(rank: int, dlrm: dict[str, Any], tmp_path: Path) -> None:
    port = free_port()
    process = start_rank(rank, port, dlrm, tmp_path)
    assert process.stderr is not None
    if rank == 0:
        assert process.stderr.readline().startswith("training dlrm on ")
    line = process.stderr.readline()
    if rank == 0:
        assert line == f"waiting for 2 processes at 127.0.0.1:{port}: this is rank 0\n"
        with pytest.raises(ConnectionRefusedError):  # it listens on the given address only
            socket.create_connection(("127.0.0.2", port))
    else:
        assert line == f"waiting for rank 0 at 127.0.0.1:{port}\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 75
    assert process.stderr.read().startswith("recmill: preempted: ended at once by SIGTERM")


def test_a_peer_that_is_killed_is_named_by_the_others(dlrm: dict[str, Any], tmp_path: Path) -> None:
    port = free_port()
    killed = start_rank(1, port, dlrm, tmp_path, fail="train.step@step=7:kill")
    survivor = start_rank(0, port, dlrm, tmp_path)
    _, output = survivor.communicate(timeout=180)
    assert killed.wait(180) == -signal.SIGKILL
    assert survivor.returncode == ResourceError.exit_code, output
    message = "Rank 0 cannot continue: rank 1 of the job ended ("  # and what gloo says, which varies
    assert f"recmill: resource error: {message}" in output
    assert "then start all of them again" in output
    at = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (at["state"], at["rank"]) == ("failed", 1)
    assert at["reason"].startswith(message)


def test_ranks_that_do_not_come_in_time_are_named() -> None:
    store = dist.HashStore()
    store.set("recmill/process/2", "other")
    with pytest.raises(LostPeerError, match=r"^Ranks 1, 3 of the job did not join within train.join_seconds") as caught:
        world._wait_for_peers(store, rank=0, size=4, deadline=time.monotonic())
    assert caught.value.rank is None
    with pytest.raises(
        LostPeerError, match=r"^Rank 0 of the job did not .* MASTER_ADDR = 127.0.0.1, .* refused"
    ) as one:
        world._wait_for_server("127.0.0.1", free_port(), deadline=time.monotonic())
    assert one.value.rank == 0


def test_processes_that_contradict_each_other_are_refused() -> None:
    store = dist.HashStore()
    world._wait_for_peers(store, rank=0, size=1, deadline=time.monotonic())
    with pytest.raises(ConfigError, match=r"WORLD_SIZE = 2, but another process of this job has WORLD_SIZE = 1"):
        world._wait_for_peers(store, rank=1, size=2, deadline=time.monotonic())
    with pytest.raises(ConfigError, match=r"RANK = 0, but another process of this job has that rank"):
        world._wait_for_peers(store, rank=0, size=1, deadline=time.monotonic())


def test_an_address_that_cannot_be_used_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ResourceError, match=rf"MASTER_PORT = {port}: Address already in use.* Choose another port"):
            world._listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR = 192.0.2.1, .* must be an address of the machine that runs"):
        world._listen("192.0.2.1", 5)


def test_a_host_name_that_its_own_machine_maps_to_loopback_can_be_reached_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 5))]
    asked: list[tuple[str, int]] = []

    def create_server(address: tuple[str, int], family: int) -> socket.socket:
        asked.append(address)
        return socket.socket(family)

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "create_server", create_server)
    for host in ("node7", "127.0.1.1"):
        os.close(world._listen(host, 5))
    assert asked == [("", 5), ("127.0.1.1", 5)]


def test_a_name_is_looked_up_again_only_if_the_name_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [socket.EAI_AGAIN, socket.EAI_NONAME]

    def fail(*_: object, **__: object) -> None:
        code = codes.pop(0)
        raise socket.gaierror(code, f"code {code}")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ConfigError, match=rf"MASTER_ADDR = typo is not known here: code {socket.EAI_NONAME}. Correct"):
        world._wait_for_server("typo", 5, deadline=time.monotonic() + 60)
    assert not codes


def test_a_program_on_the_port_that_is_no_rank_is_an_error() -> None:
    """It accepts connections and never answers, where TCPStore would wait forever."""
    code = "import os\nfrom recmill.world import join_world\ntry: join_world('cpu', 0.5)\n"
    code += "except Exception as error: print(type(error).__name__, error, flush=True)\nos._exit(0)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        place = {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | place, timeout=200, check=True)
    fact = f"ResourceError What listens on MASTER_ADDR = 127.0.0.1, MASTER_PORT = {port} is not rank 0 of this job."
    assert done.stdout == f"{fact} Choose another port, the same for all processes.\n"
