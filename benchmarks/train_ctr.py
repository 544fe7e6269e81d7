"""Measure samples per second of DLRM training, in two published shapes, on the same generated rows.

ours         `recmill train`, the real command: rows are shuffled and read from files, one process with all threads
torchrec_1   TorchRec's DLRM under DistributedModelParallel with its own loader, one process with all threads
torchrec_n   the same with one process per core and the same global batch
plain        nn.EmbeddingBag(sparse=True) per table as in the original DLRM; its batches are in memory beforehand
ceiling      only the step's matrix products, in their shapes, with the allocator settings of ours

ours_torch   ours with `train.kernels = "torch"`: the speed without a C++ compiler

All use SGD, which is the fastest for each of them. All are started, then paused (SIGSTOP) except during their turns of
a few seconds. Rates are medians over rounds, ratios are medians over neighbouring turns. `--growth` prints how the time
of our step grows with processes, batch and tables.

With `--device cuda`, ours and torchrec_n have one process per GPU (`--procs`), TorchRec's trains with its pipeline, and
each turn starts its contender anew: the collectives of a paused process would keep the GPUs busy.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from turns import Contender, Notes, Work, median_ratio, noted_times, noted_work, our_times, run_all, run_anew

from recmill.launch.processes import TUNING

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
    device: str = "cpu"
    procs: int = 1  # number of GPUs
    steps_per_report: int = 1  # of ours


SHAPES = {
    "mlperf": Shape(128, (512, 256, 128), (1024, 1024, 512, 256), 4096),
    "deeprec": Shape(16, (512, 256, 64, 16), (512, 256), 2048),
}


def write_rows(path: Path, rows: int, cap: int) -> list[int]:
    """Write TorchRec's npy files and adopt them. Ids are log-uniform (Zipf's law) over each table."""
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
    from recmill.data.opening import open_dataset
    from recmill.schema import ClicksDescription

    description = open_dataset(data).description
    assert isinstance(description, ClicksDescription)
    return [feature.rows for feature in description.sparse]


def forever(step: Any, shape: Shape, times: Path) -> None:
    """Repeat `step` and record when each one ended."""
    notes = Notes(times)
    while True:
        step()
        notes.step(shape.batch)


def run_config(shape: Shape, data: Path, **train: Any) -> dict[str, Any]:
    return {
        "data": {"path": str(data), "limit_val_batches": 1, "limit_test_batches": 1},
        "model": {"name": "dlrm", "embedding_dim": shape.dim, "bottom_mlp": shape.bottom, "top_mlp": shape.top},
        "optim": {"dense": {"name": "sgd", "lr": 0.01}, "tables": {"name": "sgd", "lr": 0.01}},
        "train": {"device": shape.device, "global_batch_size": shape.batch, "num_epochs": 10**6, **train},
        "eval": {"every_steps": 10**9},
        "checkpoint": {"every_steps": 10**9},
    }


def ours(shape: Shape, data: Path, times: Path, kernels: str = "auto") -> None:
    """Run the command, which records its steps in metrics.jsonl."""
    from recmill import train

    config = run_config(shape, data, log_every_steps=shape.steps_per_report, kernels=kernels)
    train(config, times, procs=shape.procs)


def ours_torch(shape: Shape, data: Path, times: Path) -> None:
    ours(shape, data, times, "torch")


def torchrec(shape: Shape, data: Path, times: Path) -> None:
    """Train as TorchRec's example does; on CPU without its pipeline, which is slower there than this loop."""
    import torch
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection
    from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, InMemoryBinaryCriteoIterDataPipe
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    on_gpu = shape.device == "cuda"
    device = torch.device("cuda", int(os.environ["RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
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
            dense_device=device,
        )
    )
    embeddings = model.model.sparse_arch.parameters()
    apply_optimizer_in_backward(torch.optim.SGD, embeddings, {"lr": 0.01})
    per_rank = shape.batch // size
    topology = Topology(local_world_size=size, world_size=size, compute_device=shape.device)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=per_rank)
    sharders = get_default_sharders()
    group = dist.group.WORLD
    assert group is not None
    plan = planner.collective_plan(model, sharders, group)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
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
            yield from (batch.pin_memory() for batch in pipe) if on_gpu else pipe

    batches = endless()
    pipeline = TrainPipelineSparseDist(sharded, optimizer, device) if on_gpu else None

    def step() -> None:
        if pipeline:
            pipeline.progress(batches)
            return
        optimizer.zero_grad()
        loss, _ = sharded(next(batches))
        loss.backward()
        optimizer.step()

    forever(step, shape, times)


def plain(shape: Shape, data: Path, times: Path) -> None:
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

    forever(step, shape, times)


def ceiling(shape: Shape, data: Path, times: Path) -> None:
    """Multiply for each layer: output, gradient by weights and by inputs (not by features); then the pair products."""
    import torch

    from recmill.kernels.products import product, weight_gradient

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
            product(x, weight.t())
        torch.bmm(stacked, stacked.transpose(1, 2))
        for x, weight, out, needs_input in layers:
            weight_gradient(x, out)
            if needs_input:
                product(out, weight)
        torch.bmm(grad, stacked)

    forever(step, shape, times)


CONTENDERS: dict[str, Any] = {
    "ours": ours,
    "ours_torch": ours_torch,
    "torchrec_1": torchrec,
    "torchrec_n": torchrec,
    "plain": plain,
    "ceiling": ceiling,
}
ON_GPUS = ("ours", "torchrec_n")


def start(name: str, options: argparse.Namespace, data: Path, folder: Path) -> Contender:
    """Start a contender, whose files are in `folder`."""
    cores = len(os.sched_getaffinity(0))
    shape = shape_of(options)
    size = 1
    if name == "torchrec_n":
        size = shape.procs if shape.device == "cuda" else cores
    folder.mkdir(exist_ok=True)
    times, environment = folder / name, dict(os.environ)
    if name == "ceiling":
        environment = {**TUNING, **environment}
    command = [sys.executable, __file__, "--only", name, "--shape", options.shape, "--batch", str(shape.batch)]
    command += ["--device", shape.device, "--procs", str(shape.procs), "--data", str(data), "--times"]
    log = folder / f"{name}.txt"
    if name.startswith("ours"):
        per_report = shape.batch * shape.steps_per_report
        return Contender(
            name,
            [[*command, str(times)]],
            [environment],
            log,
            partial(our_times, times),
            lambda reports: Work(per_report * (reports.stop - reports.start)),
        )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": str(max(1, cores // size))}
    return Contender(
        name,
        [[*command, str(times) if rank == 0 else os.devnull] for rank in range(size)],
        [{**environment, "RANK": str(rank)} for rank in range(size)],
        log,
        partial(noted_times, times),
        partial(noted_work, times),
    )


def growth(folder: Path) -> dict[str, Any]:
    """Return the milliseconds of our step with DeepRec's layers."""
    from recmill import train

    base = SHAPES["deeprec"]
    table: dict[str, Any] = {}

    def add(label: str, rows: int, batch: int, procs: int) -> None:
        data = folder / f"rows-{rows}"
        if not data.exists():
            write_rows(data, 400_000, rows)
        shape = Shape(base.dim, base.bottom, base.top, batch)
        steps = max(20, 200_000 // batch)
        with tempfile.TemporaryDirectory(dir=folder) as run:
            train(run_config(shape, data, log_every_steps=1, max_steps=steps), run, procs=procs)
            lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        rates = [line["samples_per_s"] for line in lines if line["split"] == "train"][steps // 4 :]
        table[label] = round(1000 * batch / statistics.median(rates), 2)
        print(f"{label:45} {table[label]:8.2f} ms/step  {batch / table[label]:8.1f}k samples/s", flush=True)

    for procs in (1, 2):
        for batch in (512, 1024, 2048, 4096, 8192, 16384):
            add(f"{procs} process(es), batch {batch}, tables 200k", 200_000, batch, procs)
    for rows in (10_000, 100_000, 1_000_000, 4_000_000):
        add(f"1 process(es), batch 2048, tables {rows}", rows, 2048, 1)
    return table


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the shape with what the options change. On GPUs a report of every step would wait for every step."""
    shape = replace(SHAPES[options.shape], device=options.device, procs=options.procs)
    shape = replace(shape, batch=options.batch or shape.batch)
    return replace(shape, steps_per_report=10) if options.device == "cuda" else shape


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape = shape_of(options)
    data = folder / "rows"
    write_rows(data, 400_000, 200_000)

    def starts(folder: Path) -> Iterator[Contender]:
        return (start(name, options, data, folder) for name in options.contenders)

    if options.device == "cuda":
        found, memory = run_anew((starts(folder / f"round-{n}") for n in range(options.rounds)), options.seconds)
    else:
        found, memory = run_all(starts(folder), options.rounds, options.seconds)
    rates = {name: [rate.samples for rate in turns] for name, turns in found.items()}
    line: dict[str, Any] = {"benchmark": "train_ctr", "shape": options.shape, "batch": shape.batch}
    line |= {"device": shape.device, "procs": shape.procs} if shape.device == "cuda" else {}
    line |= {name: round(statistics.median(turns)) for name, turns in rates.items()}
    others = [name for name in rates if "ours" in rates and name != "ours"]
    line |= {f"ours_times_{name}": median_ratio(rates["ours"], rates[name]) for name in others}
    return line | {f"{name}_peak_mb": mb for name, mb in memory.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="deeprec")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each turn")
    parser.add_argument("--contenders", default="", help="separated by commas (default: all that run on the device)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--procs", type=int, default=1, help="number of GPUs (cuda only)")
    parser.add_argument("--batch", type=int, default=0, help="global batch (default: the shape's)")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--times", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = list(CONTENDERS if options.device == "cpu" else ON_GPUS)
    options.contenders = options.contenders.split(",") if options.contenders else known
    if wrong := set(options.contenders) - set(known):
        parser.error(f"--contenders {','.join(wrong)}: on {options.device} there are {','.join(known)}")
    if options.device == "cpu" and options.procs != 1:
        parser.error("--procs is for --device cuda")
    if options.only:
        CONTENDERS[options.only](shape_of(options), options.data, options.times)
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.growth:
            print(json.dumps({"benchmark": "train_ctr_growth", "ms_per_step": growth(Path(folder))}))
        else:
            print(json.dumps(compare(options, Path(folder))))


if __name__ == "__main__":
    main()
