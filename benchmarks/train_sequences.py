"""Measure training of BERT4Rec or SASRec on MovieLens 1M on CPU: sequences and real items (no padding) per second.

ours               `recmill train` with the shipped config
torchrec_style     BERT4Rec as in TorchRec's example: eager, padded to max_length, logits of the whole catalogue at
                   every position, dense Adam; written for this benchmark
rectools           RecTools' model.fit with its defaults, except for the sizes
replay             RePlay's model under Lightning's trainer with its defaults, except for the sizes
replay_restricted  the same with RePlay's other loss for BERT4Rec, which computes logits only at the masked positions
ceiling            only the matrix products of our step: for the real items, in their lengths, of batches of our loader,
                   with the allocator settings of ours

All have the same sizes and the same windows of histories. RecTools and RePlay run in their own environments
(.venv-rectools, .venv-replay), which are created when first needed. All are started, then paused (SIGSTOP) except
during their turns of some seconds. Rates are medians over rounds, ratios are medians over neighbouring turns. Ratios
are those of real items: our batches have windows of similar length, so sequences per second vary from turn to turn.

`--random` trains only ours, on the random set of TorchRec's example (3,000 users, 500,000 items, 8 million
interactions, max_length 16, dim 128, batch 8 per process), with sharded tables (dmp) and with every table on every
process (ddp), in 1 and 2 processes.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from sequence_peers import Setting, Windows
from turns import Contender, Notes, Work, median_ratio, noted_times, noted_work, our_times, run_all

from recmill import prepare
from recmill.config import load_config
from recmill.data.opening import open_dataset
from recmill.errors import UserError
from recmill.launch.processes import TUNING
from recmill.schema import HistoriesDescription

REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENTS = {"rectools": "rectools", "replay": "replay", "replay_restricted": "replay"}  # requirements/NAME.txt
CONTENDERS = {
    "bert4rec": ["ours", "torchrec_style", "rectools", "replay", "replay_restricted", "ceiling"],
    "sasrec": ["ours", "rectools", "replay", "ceiling"],
}
# Fixes the work of a step, whatever the shipped config says, and cross-entropy over the catalogue for all.
SIZES = ["model.embedding_dim=64", "model.num_layers=2", "model.num_heads=2", "model.sliding_step=0"]
SIZES_OF = {
    # Windows that end anywhere would be shorter than the peers' and have fewer targets.
    "bert4rec": [
        *SIZES,
        "model.mask_prob=0.2",
        "model.mask_last_only=0.1",
        "model.mask_last_anywhere=false",
        "model.dupe_factor=1",
    ],
    "sasrec": [*SIZES, 'model.loss="softmax"'],
}
FOREVER = ["train.num_epochs=1000000", "eval.every_steps=1000000000", "checkpoint.every_steps=1000000000"]
FOREVER += ["train.log_every_steps=1", 'train.device="cpu"']


@dataclass(frozen=True)
class BatchShape:
    lengths: np.ndarray  # real items of each row
    asked: int  # positions to predict


@dataclass(frozen=True)
class Ours:
    """Our run: the shipped config of a model with what the options change."""

    model: str
    data: Path
    max_length: int
    batch: int

    @property
    def file(self) -> Path:
        return REPOSITORY / "configs" / "ml_1m" / f"{self.model}.toml"

    @property
    def overrides(self) -> list[str]:
        own = [f'data.path="{self.data}"', f"model.max_length={self.max_length}"]
        return [*own, f"train.global_batch_size={self.batch}", *SIZES_OF[self.model], *FOREVER]

    @cached_property
    def config(self) -> Any:
        return load_config(self.file, self.overrides)

    @property
    def setting(self) -> Setting:
        model = self.config.model
        mask = model.mask_prob if self.model == "bert4rec" else 0.0
        return Setting(
            self.model, self.max_length, self.batch, model.embedding_dim, model.num_layers, model.num_heads, mask
        )

    def windows(self) -> Windows:
        """Make windows as ours are: backwards from a history's end, without overlap, without its last two items."""
        dataset = open_dataset(self.data)
        assert isinstance(dataset.description, HistoriesDescription)
        items, offsets = np.asarray(dataset.array("items.npy")), np.asarray(dataset.array("offsets.npy"))
        answer = int(self.model == "sasrec")  # one item more than the model sees
        parts = [
            items[max(begin, stop - self.max_length - answer) : stop].astype(np.int64)
            for begin, end in zip(offsets[:-1].tolist(), (offsets[1:] - 2).tolist(), strict=True)
            for stop in range(end, begin + answer, -self.max_length)
        ]
        ends = np.cumsum([0] + [len(part) for part in parts])
        return Windows(self.setting, dataset.description.num_items, np.concatenate(parts), ends)

    def batches(self) -> Iterator[BatchShape]:
        """Yield the shapes of the batches of steps 1, 2, ... of the run."""
        from recmill.commands.assemble import build_source, open_matching_dataset

        source = build_source(self.config, open_matching_dataset(self.config), rank=0, size=1)
        for epoch in count():
            for batch in source.train_batches(epoch, 0):
                yield BatchShape(batch.lengths_B.numpy(), len(batch.queries_M))


def ceiling(ours: Ours, notes: Notes) -> None:
    """Compute each product with both of its gradients, but only what a step needs: half of causal attention, and in the
    last layer what leads to the predicted positions. Logits are computed in chunks, which is faster than at once."""
    import torch

    setting, windows = ours.setting, ours.windows()
    shapes = [shape for shape, _ in zip(ours.batches(), range(len(windows) // setting.batch), strict=False)]
    most = max(int(shape.lengths.sum()) for shape in shapes)
    dim, head_dim, chunk = setting.dim, setting.dim // setting.heads, 128

    def layer(rows: int, i: int, o: int) -> tuple[Any, Any, Any]:
        return torch.randn(rows, i), torch.randn(o, i), torch.randn(rows, o)

    after_keys = [layer(most, i, o) for i, o in [(dim, dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim)]]
    whole = [layer(most, dim, 3 * dim), *after_keys[1:]]
    keys_and_values, head = layer(most, dim, 2 * dim), layer(chunk, dim, windows.num_items)
    heads_per_row = setting.heads / (2 if setting.model == "sasrec" else 1)
    pieces = max(1, setting.batch * setting.heads)
    values = torch.randn(pieces * setting.max_length * head_dim)
    squares = torch.randn(pieces * setting.max_length**2)

    def three_products(rows: int, x: Any, weight: Any, grad: Any) -> None:
        torch.mm(x[:rows], weight.t())
        torch.mm(grad[:rows].t(), x[:rows])
        torch.mm(grad[:rows], weight)

    def attention(lengths: np.ndarray, asked_share: float) -> None:
        for length, rows in zip(*np.unique(lengths, return_counts=True), strict=True):
            many, length = max(1, round(rows * heads_per_row)), int(length)
            asked = max(1, round(length * asked_share))
            x = values[: many * length * head_dim].view(many, length, head_dim)
            q = values[: many * asked * head_dim].view(many, asked, head_dim)
            square = squares[: many * asked * length].view(many, asked, length)
            torch.bmm(q, x.transpose(1, 2))  # scores
            torch.bmm(square, x)  # their mix of values
            torch.bmm(q, x.transpose(1, 2))  # by scores
            torch.bmm(square.transpose(1, 2), q)  # by values
            torch.bmm(square, x)  # by queries
            torch.bmm(square.transpose(1, 2), q)  # by keys

    while True:
        for shape in shapes:
            items = int(shape.lengths.sum())
            for _ in range(setting.layers - 1):
                for parts in whole:
                    three_products(items, *parts)
                attention(shape.lengths, 1.0)
            three_products(items, *keys_and_values)
            for parts in after_keys:
                three_products(shape.asked, *parts)
            attention(shape.lengths, shape.asked / items)
            for start in range(0, shape.asked, chunk):
                three_products(min(chunk, shape.asked - start), *head)
            notes.step(len(shape.lengths), items)


def environment_of(name: str) -> Path:
    """Return the python of a peer's own environment, after creating or updating it."""
    requirements = REPOSITORY / "requirements" / f"{name}.txt"
    directory = REPOSITORY / f".venv-{name}"
    python, done = directory / "bin" / "python", directory / "installed.txt"
    if not done.is_file() or done.read_text() != requirements.read_text():
        print(f"installing {requirements.relative_to(REPOSITORY)} into {directory.name}", flush=True)
        for command in (
            [sys.executable, "-m", "venv", str(directory)],
            [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)],
        ):
            if subprocess.run(command).returncode:
                sys.exit(f"{name} could not be installed, see above. Leave it out with --contenders.")
        done.write_text(requirements.read_text())
    return python


def recmill_train(config: Path, run: Path, overrides: list[str], procs: int = 1) -> list[str]:
    command = [sys.executable, "-m", "recmill", "train", str(config), "--run", str(run), "--procs", str(procs)]
    return [*command, *(word for override in overrides for word in ("--set", override))]


def start(name: str, python: Path, ours: Ours, folder: Path) -> Contender:
    noted = folder / name
    cores = str(len(os.sched_getaffinity(0)))
    environment = {"OMP_NUM_THREADS": cores, **os.environ}
    times: Callable[[], list[float]] = partial(noted_times, noted)
    work: Callable[[slice], Work] = partial(noted_work, noted)
    if name == "ours":
        command, environment = recmill_train(ours.file, noted, ours.overrides), dict(os.environ)
        batches, known = ours.batches(), list[BatchShape]()

        def our_work(steps: slice) -> Work:
            known.extend(next(batches) for _ in range(steps.stop - len(known)))
            done = known[steps]
            return Work(sum(len(batch.lengths) for batch in done), sum(int(batch.lengths.sum()) for batch in done))

        times, work = partial(our_times, noted), our_work
    elif name == "ceiling":
        command = [sys.executable, __file__, "--only-ceiling", str(noted), "--data", str(ours.data)]
        command += ["--model", ours.model, "--max-length", str(ours.max_length), "--batch", str(ours.batch)]
        environment = {**TUNING, **environment}
    else:
        command = [str(python), str(REPOSITORY / "benchmarks" / "sequence_peers.py"), name, str(folder), str(noted)]
    return Contender(name, [command], [environment], folder / f"{name}.txt", times, work)


def compare(options: argparse.Namespace, ours: Ours, folder: Path) -> dict[str, Any]:
    windows = ours.windows()
    windows.save(folder)
    print(f"{len(windows):,} windows of {len(windows.items) / len(windows):.1f} items, {ours.setting}", flush=True)
    names = options.contenders.split(",") if options.contenders else CONTENDERS[ours.model]
    pythons = {
        name: environment_of(ENVIRONMENTS[name]) if name in ENVIRONMENTS else Path(sys.executable) for name in names
    }
    contenders = (start(name, python, ours, folder) for name, python in pythons.items())
    rates, memory = run_all(contenders, options.rounds, options.seconds)
    line: dict[str, Any] = {"benchmark": "train_sequences", "model": ours.model, "max_length": ours.max_length}
    line["batch"] = ours.batch
    line |= {name: round(statistics.median(rate.samples for rate in found), 1) for name, found in rates.items()}
    items = {name: [rate.items for rate in found] for name, found in rates.items()}
    line |= {f"{name}_items": round(statistics.median(found)) for name, found in items.items()}
    if "ours" in items:
        others = [name for name in items if name != "ours"]
        line |= {f"ours_times_{name}": median_ratio(items["ours"], items[name]) for name in others}
    return line | {f"{name}_peak_mb": mb for name, mb in memory.items()}


def random_set(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure TorchRec's table with our processes instead of GPUs. Both modes have the same optimizers."""
    data = folder / "random"
    prepare("random-histories", data, random_user_count=3000, random_item_count=500_000, random_size=8_000_000)
    sizes = ["model.max_length=16", "model.embedding_dim=128", "model.mask_prob=0.2"]
    # Overlapping windows and copies change no step, only the time to sort 24 million windows.
    sizes += ["model.sliding_step=0", "model.dupe_factor=1"]
    optim = ['optim.tables.name="rowwise_adagrad"', "optim.tables.lr=0.001"]
    no_evaluation = ["eval.before_training=false", 'eval.protocols=["full"]']
    common = [f'data.path="{data}"', *sizes, *optim, *no_evaluation, *FOREVER]
    ways = {"ddp": ['sharding.mode="ddp"'], "dmp": ['sharding.mode="auto"', f'sharding.default="{options.sharding}"']}
    config = REPOSITORY / "configs" / "ml_1m" / "bert4rec_torchrec.toml"

    def begin(way: str, procs: int) -> Contender:
        run, batch = folder / f"{way}_{procs}", 8 * procs
        command = recmill_train(config, run, [*common, *ways[way], f"train.global_batch_size={batch}"], procs)

        def work(steps: slice) -> Work:
            return Work(batch * (steps.stop - steps.start))

        log = folder / f"{run.name}.txt"
        return Contender(run.name, [command], [dict(os.environ)], log, partial(our_times, run), work)

    line: dict[str, Any] = {"benchmark": "train_sequences_random", "sharding": options.sharding}
    for procs in (1, 2):
        rates, memory = run_all((begin(way, procs) for way in ways), options.rounds, options.seconds)
        found = {name: [rate.samples for rate in of] for name, of in rates.items()}
        line |= {name: round(statistics.median(of), 2) for name, of in found.items()}
        line[f"dmp_times_ddp_{procs}"] = median_ratio(found[f"dmp_{procs}"], found[f"ddp_{procs}"])
        line |= {f"{name}_peak_mb": mb for name, mb in memory.items()}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/ml-1m"), help="prepared MovieLens 1M")
    parser.add_argument("--input", type=Path, help="folder of MovieLens 1M's raw files, which are prepared into --data")
    parser.add_argument("--model", choices=CONTENDERS, default="bert4rec")
    parser.add_argument("--max-length", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each turn, at least three steps")
    parser.add_argument("--contenders", help="the contenders to run, separated by commas")
    parser.add_argument("--random", action="store_true", help="the random set of TorchRec's example, dmp against ddp")
    parser.add_argument("--sharding", default="auto", help="with --random: how dmp shards the table (default: auto)")
    parser.add_argument("--only-ceiling", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set((options.contenders or "ours").split(",")) - set(CONTENDERS[options.model])
    if unknown:
        known = ", ".join(CONTENDERS[options.model])
        sys.exit(f"--contenders: {min(unknown)!r} is not a contender for --model {options.model}. Known: {known}.")
    try:
        if options.input:
            prepare("movielens", options.data, input=options.input)
        ours = Ours(options.model, options.data.absolute(), options.max_length, options.batch)
        if options.only_ceiling:
            ceiling(ours, Notes(options.only_ceiling))
        with tempfile.TemporaryDirectory() as folder:
            found = random_set(options, Path(folder)) if options.random else compare(options, ours, Path(folder))
        print(json.dumps(found))
    except UserError as error:
        sys.exit(f"{error}\n(--input: MovieLens 1M's raw files; --data: the prepared dataset)")


if __name__ == "__main__":
    main()
