"""Samples per second of DLRM training on CPU, in two published shapes, on the same generated rows.

ours         `recmill train`, so the real loop: rows shuffled and read from files, one process with all threads
torchrec_1   TorchRec's DLRM under DistributedModelParallel with its own loader, one process with all threads
torchrec_n   the same, one process per core, the same global batch
plain        nn.EmbeddingBag(sparse=True) per table as in the original DLRM; batches are in memory before it starts
ceiling      the step's matrix multiplications alone, at their shapes, with the allocator settings that ours has

All use SGD, the fastest for every one of them. Contenders take turns, each in a new process; medians over rounds.
`--growth` prints what a step costs as processes, batch and tables grow, ours alone.
"""

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP_SECONDS = 3.0
# Distinct ids of each column of Criteo 1TB as MLPerf counts them, before any cap.
CARDINALITIES = (
    *(45_833_188, 36_746, 17_245, 7_413, 20_243, 3, 7_114, 1_441, 62, 29_275_261, 1_572_176, 345_138, 10),
    *(2_209, 11_267, 128, 4, 974, 14, 48_937_457, 11_316_796, 40_094_537, 452_104, 12_606, 104, 35),
)
NUM_DENSE = 13


@dataclass(frozen=True)
class Shape:
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]  # without the logit
    batch: int


SHAPES = {
    "mlperf": Shape(128, (512, 256, 128), (1024, 1024, 512, 256), 4096),
    "deeprec": Shape(16, (512, 256, 64, 16), (512, 256), 2048),
}


def write_rows(path: Path, rows: int, cap: int) -> list[int]:
    """TorchRec's npy files, adopted. Ids are log-uniform (Zipf's law) over each table."""
    from recmill import adopt

    sizes = [min(size, cap) for size in CARDINALITIES]
    random = np.random.default_rng(1)
    path.mkdir()
    ids = np.stack([np.exp(random.random(rows) * np.log(size + 1)).astype(np.int32) - 1 for size in sizes], axis=1)
    np.save(path / "day_0_sparse.npy", np.minimum(ids, np.array(sizes, dtype=np.int32) - 1))
    np.save(path / "day_0_dense.npy", np.log1p(random.integers(0, 1000, (rows, NUM_DENSE))).astype(np.float32))
    np.save(path / "day_0_labels.npy", (random.random((rows, 1)) < 0.25).astype(np.int32))
    adopt(path, table_size=sizes, val_fraction=0.02)
    return sizes


def table_sizes(data: Path) -> list[int]:
    from recmill.schema import ClicksDescription, open_dataset

    about = open_dataset(data).about
    assert isinstance(about, ClicksDescription)
    return [feature.rows for feature in about.sparse]


def timed(step: Any, seconds: float, samples: int) -> float:
    """Samples per second of step(), after a warm-up."""
    end = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        step()
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        step()
        steps += 1
    return steps * samples / (time.perf_counter() - started)


def ours(shape: Shape, data: Path, seconds: float, procs: int = 1) -> float:
    """From what the command itself logged: all reports but the first, which has the warm-up."""
    from recmill import train

    def run_for(steps: int, log_every: int) -> list[dict[str, Any]]:
        config: dict[str, Any] = {
            "data": {"path": str(data), "limit_val_batches": 1, "limit_test_batches": 1},
            "model": {
                "name": "dlrm",
                "embedding_dim": shape.dim,
                "bottom_mlp": shape.bottom,
                "top_mlp": shape.top,
            },
            "optim": {"dense": {"name": "sgd", "lr": 0.01}, "tables": {"name": "sgd", "lr": 0.01}},
            "train": {
                "device": "cpu",
                "global_batch_size": shape.batch,
                "num_epochs": 1000,
                "max_steps": steps,
                "log_every_steps": log_every,
            },
            "eval": {"every_steps": 10**9},
            "checkpoint": {"every_steps": 10**9},
        }
        with tempfile.TemporaryDirectory(dir=data) as run:
            train(config, run, procs=procs)
            lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["split"] == "train"]

    guess = run_for(12, 6)[-1]["samples_per_s"]
    log_every = max(1, round(WARM_UP_SECONDS * guess / shape.batch))
    reports = 1 + max(1, round(seconds / WARM_UP_SECONDS))
    return statistics.harmonic_mean(line["samples_per_s"] for line in run_for(reports * log_every, log_every)[1:])


def torchrec(shape: Shape, data: Path, seconds: float) -> float:
    """As its example sets it up, but for the pipeline, which on CPU is slower than this loop."""
    import torch
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection
    from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, InMemoryBinaryCriteoIterDataPipe
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = table_sizes(data)
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=shape.dim, num_embeddings=rows[i], feature_names=[name])
        for i, name in enumerate(DEFAULT_CAT_NAMES)
    ]
    model = DLRMTrain(
        DLRM(
            EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=NUM_DENSE,
            dense_arch_layer_sizes=list(shape.bottom),
            over_arch_layer_sizes=[*shape.top, 1],
            dense_device=torch.device("cpu"),
        )
    )
    embeddings = model.model.sparse_arch.parameters()
    apply_optimizer_in_backward(torch.optim.SGD, embeddings, {"lr": 0.01})
    per_rank = shape.batch // size
    topology = Topology(local_world_size=size, world_size=size, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=per_rank)
    sharders = get_default_sharders()
    group = dist.group.WORLD
    assert group is not None
    plan = planner.collective_plan(model, sharders, group)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), lambda params: torch.optim.SGD(params, lr=0.01)
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
    files = [[str(data / f"day_0_{part}.npy")] for part in ("dense", "sparse", "labels")]

    def endless() -> Any:
        while True:
            pipe = InMemoryBinaryCriteoIterDataPipe(
                "train", *files, per_rank, rank, size, drop_last=True, mmap_mode=True, hashes=rows
            )
            yield from pipe

    batches = endless()

    def step() -> None:
        optimizer.zero_grad()
        loss, _ = sharded(next(batches))
        loss.backward()
        optimizer.step()

    if size == 1:
        return timed(step, seconds, shape.batch)
    steps = 3  # the ranks must agree on a number
    for _ in range(steps):
        step()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    speed = torch.tensor([steps / (time.perf_counter() - started)])
    dist.broadcast(speed, 0)
    for _ in range(int(WARM_UP_SECONDS * speed)):
        step()
    steps = max(1, int(seconds * speed))
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return steps * shape.batch / (time.perf_counter() - started)


def plain(shape: Shape, data: Path, seconds: float) -> float:
    import torch
    from torch import nn

    def mlp(sizes: list[int]) -> nn.Sequential:
        layers: list[nn.Module] = []
        for i, o in pairwise(sizes):
            layers += [nn.Linear(i, o), nn.ReLU()]
        return nn.Sequential(*layers)

    rows = table_sizes(data)
    bags = nn.ModuleList(nn.EmbeddingBag(n, shape.dim, mode="sum", sparse=True) for n in rows)
    vectors = len(rows) + 1
    below, left = torch.tril_indices(vectors, vectors, offset=-1)
    bottom = mlp([NUM_DENSE, *shape.bottom])
    top = nn.Sequential(mlp([shape.dim + len(below), *shape.top]), nn.Linear(shape.top[-1], 1))
    optimizer = torch.optim.SGD([*bags.parameters(), *bottom.parameters(), *top.parameters()], lr=0.01)
    dense, ids, labels = (torch.from_numpy(np.load(data / f"day_0_{p}.npy")) for p in ("dense", "sparse", "labels"))
    count = len(labels) // shape.batch
    batches = [
        (dense[at].clone(), list(ids[at].long().T.contiguous()), labels[at, 0].float())
        for at in (slice(i * shape.batch, (i + 1) * shape.batch) for i in range(count))
    ]
    offsets = torch.arange(shape.batch)
    number = 0

    def step() -> None:
        nonlocal number
        x, columns, y = batches[number % count]
        number += 1
        first = bottom(x)
        pooled = [bag(column, offsets) for bag, column in zip(bags, columns, strict=True)]
        stacked = torch.cat([first, *pooled], dim=1).view(-1, vectors, shape.dim)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, below, left]
        logits = top(torch.cat([first, products], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return timed(step, seconds, shape.batch)


def ceiling(shape: Shape, data: Path, seconds: float) -> float:
    """Each layer: output, gradient by weights, gradient by inputs (not by the features). Then the pairs' products."""
    import torch

    vectors = len(CARDINALITIES) + 1
    bottom = [NUM_DENSE, *shape.bottom]
    top = [shape.dim + vectors * (vectors - 1) // 2, *shape.top, 1]
    layers = [
        (torch.randn(shape.batch, i), torch.randn(o, i), torch.randn(shape.batch, o), sizes is not bottom or at > 0)
        for sizes in (bottom, top)
        for at, (i, o) in enumerate(pairwise(sizes))
    ]
    stacked = torch.randn(shape.batch, vectors, shape.dim)
    grad = torch.randn(shape.batch, vectors, vectors)

    def step() -> None:
        for x, weight, _, _ in layers:
            torch.mm(x, weight.t())
        torch.bmm(stacked, stacked.transpose(1, 2))
        for x, weight, out, needs_input in layers:
            torch.mm(out.t(), x)
            if needs_input:
                torch.mm(out, weight)
        torch.bmm(grad, stacked)

    return timed(step, seconds, shape.batch)


CONTENDERS = {"ours": ours, "torchrec_1": torchrec, "torchrec_n": torchrec, "plain": plain, "ceiling": ceiling}


def measure(name: str, shape: str, data: Path, seconds: float) -> dict[str, float]:
    """In processes of its own. Each sees the environment that its users would have."""
    from recmill.launch.local import _TUNING

    cores = len(os.sched_getaffinity(0))
    size = cores if name == "torchrec_n" else 1
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    if name == "ours":
        common = dict(os.environ)
    else:
        common |= {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": str(cores // size)}
    if name == "ceiling":
        common |= _TUNING
    command = [sys.executable, __file__, "--only", name, "--shape", shape, "--data", str(data)]
    command += ["--seconds", str(seconds)]
    ranks = [
        subprocess.Popen(
            command,
            env=common | ({} if name == "ours" else {"RANK": str(rank), "LOCAL_RANK": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{name} failed: run it alone to see why:\nRANK=0 WORLD_SIZE=1 {' '.join(command)}")
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {"samples_per_s": found[0]["samples_per_s"], "peak_mb": sum(one["peak_mb"] for one in found)}


def growth(folder: Path) -> dict[str, Any]:
    """Milliseconds per step, ours, DeepRec's layers."""
    base = SHAPES["deeprec"]
    table: dict[str, Any] = {}

    def add(label: str, rows: int, batch: int, procs: int) -> None:
        data = folder / f"rows-{rows}"
        if not data.exists():
            write_rows(data, 400_000, rows)
        shape = Shape(base.dim, base.bottom, base.top, batch)
        table[label] = round(1000 * batch / ours(shape, data, 6, procs), 2)
        print(f"{label:45} {table[label]:8.2f} ms/step  {batch / table[label]:8.1f}k samples/s", flush=True)

    for procs in (1, 2):
        for batch in (512, 1024, 2048, 4096, 8192, 16384):
            add(f"{procs} process(es), batch {batch}, tables 200k", 200_000, batch, procs)
    for rows in (10_000, 100_000, 1_000_000, 4_000_000):
        add(f"1 process(es), batch 2048, tables {rows}", rows, 2048, 1)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="deeprec")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="some of them, separated by commas")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        rate = CONTENDERS[options.only](SHAPES[options.shape], options.data, options.seconds)
        who = resource.RUSAGE_CHILDREN if options.only == "ours" else resource.RUSAGE_SELF
        print(json.dumps({"samples_per_s": rate, "peak_mb": resource.getrusage(who).ru_maxrss / 1024}), flush=True)
        os._exit(0)  # gloo may abort while it is torn down
    with tempfile.TemporaryDirectory() as folder:
        if options.growth:
            print(json.dumps({"benchmark": "train_ctr_growth", "ms_per_step": growth(Path(folder))}))
            return
        data = Path(folder) / "rows"
        write_rows(data, 400_000, 200_000)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in options.contenders.split(",")}
        for number in range(options.rounds):
            for name, results in found.items():
                results.append(measure(name, options.shape, data, options.seconds))
                print(f"round {number + 1}  {name:10}  {results[-1]['samples_per_s']:10,.0f} samples/s", flush=True)
    rates = {name: statistics.median(r["samples_per_s"] for r in results) for name, results in found.items()}
    memory = {f"{name}_peak_mb": round(max(r["peak_mb"] for r in results)) for name, results in found.items()}
    line: dict[str, Any] = {"benchmark": "train_ctr", "shape": options.shape, "batch": SHAPES[options.shape].batch}
    line |= {name: round(rate) for name, rate in rates.items()} | memory
    peers = [rate for name, rate in rates.items() if name not in ("ours", "ceiling")]
    if "ours" in rates and peers:
        line["times_fastest_peer"] = round(rates["ours"] / max(peers), 3)
    if "ours" in rates and "ceiling" in rates:
        line["of_ceiling"] = round(rates["ours"] / rates["ceiling"], 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
