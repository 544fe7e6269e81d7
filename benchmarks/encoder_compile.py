"""The transformer blocks of a BERT4Rec step on CPU, forward and backward: our kernel, eager torch, torch.compile.

kernel    `EncoderBlock` with the C++ kernel (kernels/encoder.cpp)
eager     `EncoderBlock` without it: plain torch
compiled  the same torch code through torch.compile (inductor, dynamic shapes); what a batch's row lengths decide
          (positions, attention mask) is computed outside of the compiled function, once for all blocks

Sizes are those of configs/ml_1m/bert4rec.toml: two blocks, dim 64, 2 heads, dropout 0.1, 64 windows of up to 200 items
per batch, packed without padding. Window lengths imitate MovieLens 1M's histories, and batches are made of windows of
similar lengths. Half of the windows end at a random item and query only that one; of the others 20 % of the items are
queries. The last block returns the queries only.

Variants run in processes of their own and in turns of some seconds; rates are medians over the rounds, ratios medians
of neighbouring turns, by tokens. In JSON: X is steps per second, `X_warm_up_s` the seconds of the first 40 steps, which
do not count otherwise (compiling takes most of them), `X_peak_mb` peak memory, and `X_same_bits` whether outputs and
gradients have the same bits with one, two and three threads.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from turns import Contender, Notes, median_ratio, noted_times, noted_work, run_all

from recmill.kernels.layers import use_kernels
from recmill.kernels.library import load_library
from recmill.launch.processes import TUNING
from recmill.nn.rows import Rows
from recmill.nn.transformer import EncoderBlock, TransformerShape

VARIANTS = ("kernel", "eager", "compiled")
DIM = 64
MAX_LENGTH = 200
BATCH_SIZE = 64
SHAPE = TransformerShape(MAX_LENGTH, num_layers=2, num_heads=2, dropout=0.1)
SHARE_LAST_ONLY = 0.5
SHARE_MASKED = 0.2
WARM_UP_STEPS = 40


def window_lengths(generator: np.random.Generator, num_users: int = 6040) -> np.ndarray:
    """Histories of at least 20 items, 165 on average, cut into windows from their ends; shortest window first."""
    lengths = np.maximum(20, generator.lognormal(4.55, 1.0, num_users)).astype(np.int64)
    full, rest = np.divmod(lengths, MAX_LENGTH)
    windows = np.concatenate([np.full(int(full.sum()), MAX_LENGTH), rest[rest > 0]])
    is_last_only = generator.random(len(windows)) < SHARE_LAST_ONLY
    ends = 1 + np.floor(generator.random(len(windows)) * windows).astype(np.int64)
    shortened = np.where(is_last_only, ends, windows)
    order = np.argsort(shortened, kind="stable")
    return np.stack([shortened[order], is_last_only[order]])


def batches(seed: int = 1) -> Iterator[tuple[Tensor, Rows]]:
    """Embedded tokens and rows of batches, in a random order, again and again."""
    generator = np.random.default_rng(seed)
    lengths, is_last_only = window_lengths(generator)
    starts = np.arange(0, len(lengths) - BATCH_SIZE, BATCH_SIZE)
    while True:
        for start in generator.permutation(starts):
            rows = slice(start, start + BATCH_SIZE)
            yield batch(lengths[rows], is_last_only[rows].astype(bool), generator)


def batch(lengths: np.ndarray, is_last_only: np.ndarray, generator: np.random.Generator) -> tuple[Tensor, Rows]:
    ends = np.cumsum(lengths)
    num_tokens = int(ends[-1])
    is_query = (generator.random(num_tokens) < SHARE_MASKED) & ~np.repeat(is_last_only, lengths)
    is_query[ends[is_last_only] - 1] = True
    queries = torch.from_numpy(np.flatnonzero(is_query))
    keys = torch.from_numpy(generator.integers(-(2**63), 2**63 - 1, len(lengths)))
    tokens = torch.from_numpy(generator.standard_normal((num_tokens, DIM), np.float32)).requires_grad_()
    return tokens, Rows(torch.from_numpy(lengths), int(lengths.max()), queries, keys, num_tokens)


class Encoder(nn.Module):
    """The blocks of the network, and one step: forward, and backward from a sum."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(EncoderBlock(DIM, SHAPE, site=1 + 2 * layer) for layer in range(SHAPE.num_layers))
        self._forward: Callable[[Tensor, Rows], Tensor] = self._apply_blocks
        if variant == "compiled":
            self._forward = torch.compile(self._apply_blocks, dynamic=True, fullgraph=True)
        if variant == "kernel":
            library = load_library()
            assert library is not None, "the kernel needs a C++ compiler"
            use_kernels(self, library)

    def _apply_blocks(self, x_ND: Tensor, rows: Rows) -> Tensor:
        for block in self.blocks:
            x_ND = block(x_ND, rows, outputs="queries" if block is self.blocks[-1] else "all")
        return x_ND

    def step(self, tokens_ND: Tensor, rows: Rows) -> list[Tensor]:
        """Return the output and all gradients."""
        _ = rows.row_N, rows.from_end_N, rows.is_real_BT  # outside of what is compiled
        out_MD = self._forward(tokens_ND, rows)
        return [out_MD.detach(), *torch.autograd.grad(out_MD.square().sum(), [tokens_ND, *self.parameters()])]


def train(variant: str, notes: Notes) -> None:
    """Run steps until killed. Print the seconds of the first ones, and note all others."""
    encoder = Encoder(variant)
    started = time.perf_counter()
    for number, (tokens_ND, rows) in enumerate(batches()):
        encoder.step(tokens_ND, rows)
        if number + 1 == WARM_UP_STEPS:
            print(f"warm_up_s {time.perf_counter() - started:.1f}", flush=True)
        if number >= WARM_UP_STEPS:
            notes.step(len(rows.lengths_B), rows.num_tokens)


def bits_do_not_depend_on_threads(variant: str) -> bool:
    encoder = Encoder(variant)
    inputs = list(islice(batches(), 3))
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append([tensor for one in inputs for tensor in encoder.step(*one)])
    return all(torch.equal(a, b) for one, other in pairwise(results) for a, b in zip(one, other, strict=True))


def compare(rounds: int, seconds: float, folder: Path) -> dict[str, float | int | bool | str]:
    def start(variant: str) -> Contender:
        noted = folder / variant
        command = [sys.executable, __file__, "--variant", variant, "--notes", str(noted)]
        environment = {**TUNING, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))), **os.environ}
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        times, work = partial(noted_times, noted), partial(noted_work, noted)
        return Contender(variant, [command], [environment], folder / f"{variant}.txt", times, work)

    rates, memory = run_all((start(variant) for variant in VARIANTS), rounds, seconds)
    tokens = {variant: [work.items for work in found] for variant, found in rates.items()}
    steps = {variant: [work.samples / BATCH_SIZE for work in found] for variant, found in rates.items()}
    line: dict[str, float | int | bool | str] = {"benchmark": "encoder_compile", "torch": torch.__version__}
    line |= {variant: round(statistics.median(found), 2) for variant, found in steps.items()}
    line |= {f"kernel_times_{other}": median_ratio(tokens["kernel"], tokens[other]) for other in VARIANTS[1:]}
    for variant in VARIANTS:
        words = (folder / f"{variant}.txt").read_text().split()
        line[f"{variant}_warm_up_s"] = float(words[words.index("warm_up_s") + 1])
    return line | {f"{variant}_peak_mb": mb for variant, mb in memory.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--notes", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        train(options.variant, Notes(options.notes))
    with tempfile.TemporaryDirectory() as folder:
        line = compare(options.rounds, options.seconds, Path(folder))
    line |= {f"{variant}_same_bits": bits_do_not_depend_on_threads(variant) for variant in VARIANTS}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
