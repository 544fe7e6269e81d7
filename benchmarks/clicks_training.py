"""Samples per second of DLRM training on CPU: `recmill train` against the same network in plain PyTorch.

Both read the same prepared dataset, in a new order, with the same sizes, batch and optimizers (Adagrad on tables,
Adam on layers). Loading is part of both; the plain one has everything in memory.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

WARM_UP_STEPS = 30


def plain(data: str, dim: int, batch_size: int, steps: int) -> dict[str, float]:
    """The peer, in this process."""
    import torch
    from torch import nn

    from recmill.nn.interactions import DotInteraction
    from recmill.nn.mlp import mlp
    from recmill.schema import ClicksDescription, open_dataset

    dataset = open_dataset(data)
    assert isinstance(dataset.about, ClicksDescription)
    days = [r.day for r in dataset.about.splits["train"]]
    dense, ids, labels = (
        torch.from_numpy(np.concatenate([np.load(dataset.path / f"{day}_{part}.npy") for day in days]))
        for part in ("dense", "sparse", "labels")
    )
    bags = nn.ModuleList(nn.EmbeddingBag(f.rows, dim, mode="sum", sparse=True) for f in dataset.about.sparse)
    bottom, interaction = mlp(dense.shape[1], [64, dim]), DotInteraction(len(bags) + 1, dim)
    top = nn.Sequential(mlp(interaction.out_features, [64, 32]), nn.Linear(32, 1))
    optimizers = [
        torch.optim.Adagrad(bags.parameters(), lr=0.05),
        torch.optim.Adam([*bottom.parameters(), *top.parameters()], lr=0.002),
    ]
    order = torch.randperm(len(labels))
    starts = np.arange(batch_size)
    started = 0.0
    for step in range(WARM_UP_STEPS + steps):
        if step == WARM_UP_STEPS:
            started = time.monotonic()
        rows = order[(starts + step * batch_size) % len(order)]
        batch_ids = ids[rows].long()
        pooled = torch.stack([bag(batch_ids[:, i : i + 1]) for i, bag in enumerate(bags)], dim=1)
        logits = top(interaction(bottom(dense[rows]), pooled)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels[rows, 0].float())
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return {"samples_per_s": steps * batch_size / (time.monotonic() - started)}


def ours(data: str, dim: int, batch_size: int, steps: int) -> dict[str, float]:
    """The command itself; speeds from what it logged after the first report."""
    from recmill import train

    config: dict[str, Any] = {
        "data": {"path": data},
        "model": {"name": "dlrm", "embedding_dim": dim, "bottom_mlp": [64, dim], "top_mlp": [64, 32]},
        "optim": {"dense": {"lr": 0.002}, "tables": {"name": "adagrad", "lr": 0.05}},
        "train": {
            "device": "cpu",
            "global_batch_size": batch_size,
            "num_epochs": 1000,
            "max_steps": WARM_UP_STEPS + steps,
            "log_every_steps": WARM_UP_STEPS,
        },
        "eval": {"every_steps": 10**9},
        "checkpoint": {"every_steps": 10**9},
    }
    with tempfile.TemporaryDirectory() as run:
        train(config, run)
        lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    speeds = [line["samples_per_s"] for line in lines if line["split"] == "train" and line["step"] > WARM_UP_STEPS]
    return {"samples_per_s": statistics.harmonic_mean(speeds)}


def measure(which: str, arguments: argparse.Namespace, data: str) -> dict[str, float]:
    """In a process of its own, for its own peak of memory."""
    command = [sys.executable, __file__, "--only", which, "--data", data, "--dim", str(arguments.dim)]
    command += ["--batch", str(arguments.batch), "--steps", str(arguments.steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["ours", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        run = {"ours": ours, "plain": plain}[arguments.only]
        result = run(arguments.data, arguments.dim, arguments.batch, arguments.steps)
        who = resource.RUSAGE_CHILDREN if arguments.only == "ours" else resource.RUSAGE_SELF
        print(json.dumps({**result, "peak_mb": resource.getrusage(who).ru_maxrss / 1024}))
        return
    from recmill import prepare

    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/clicks"
        prepare("synthetic-clicks", data, rows=arguments.rows)
        found: dict[str, list[dict[str, float]]] = {"ours": [], "plain": []}
        for number in range(arguments.rounds):
            for which, results in found.items():
                results.append(measure(which, arguments, data))
                print(f"round {number + 1}  {which:5}  {results[-1]['samples_per_s']:,.0f} samples/s")
    best = {which: max(r["samples_per_s"] for r in results) for which, results in found.items()}
    memory = {which: max(r["peak_mb"] for r in results) for which, results in found.items()}
    print(
        json.dumps(
            {
                "benchmark": "clicks_training",
                "batch": arguments.batch,
                "dim": arguments.dim,
                "ours_samples_per_s": round(best["ours"]),
                "plain_samples_per_s": round(best["plain"]),
                "ratio": round(best["ours"] / best["plain"], 3),
                "ours_peak_mb": round(memory["ours"]),
                "plain_peak_mb": round(memory["plain"]),
            }
        )
    )


if __name__ == "__main__":
    main()
