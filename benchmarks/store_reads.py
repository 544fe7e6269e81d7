"""Count the reads of cached_ssd beside those of an optimal cache, which knows all batches in advance (Belady's).

The cache of Recmill gets the ids of DLRM batches as in training, with and without look-ahead; nothing is computed. The
second half of the batches counts. A miss is a row that is not in memory: it is read, or used for the first time.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from store import NUM_TABLES, zipf_batches

from recmill import rng
from recmill.tables.stores.row_cache import RowCache, RowLayout, Shard, plan_cache

DIM = 16


def optimal_misses(batches: list[np.ndarray], rows: int, slots: int) -> float:
    """Return the misses per batch if those rows are evicted that are needed latest."""
    distinct = [np.unique(keys) for keys in batches]
    next_use = np.full(rows, len(batches))
    next_uses = []
    for number, keys in reversed([*enumerate(distinct)]):
        next_uses.append(next_use[keys])
        next_use[keys] = number
    cached = np.full(rows, -1)  # the next use of each row in the cache
    misses = 0
    for number, keys in enumerate(distinct):
        if number >= len(batches) // 2:
            misses += int(np.count_nonzero(cached[keys] < 0))
        cached[keys] = next_uses.pop()
        in_cache = np.flatnonzero(cached >= 0)
        if (excess := len(in_cache) - slots) > 0:
            cached[in_cache[np.argpartition(-cached[in_cache], excess)[:excess]]] = -1
    return misses / (len(batches) - len(batches) // 2)


def our_misses(batches: list[np.ndarray], rows: int, slots: int, lookahead: int) -> float:
    """Return the misses per batch of the real cache, with hints for at most `lookahead` batches."""
    shards = [Shard(rows // NUM_TABLES, 0, rng.stream_key(1, "table", name), 0.01) for name in range(NUM_TABLES)]
    layout = RowLayout(tuple(shards), DIM, 1)
    plan = plan_cache(layout, 1 << 40, max_slots=slots)
    hinted, middle = 0, len(batches) // 2
    with tempfile.TemporaryDirectory(dir=".") as path, RowCache(layout, plan, Path(path), lookahead=lookahead) as cache:
        earlier = cache.counters()
        for number, keys in enumerate(batches):
            if number == middle:
                earlier = cache.counters()
            while lookahead and hinted < len(batches) and cache.hint(hinted, batches[hinted]):
                hinted += 1
            cache.pin(keys, number if lookahead else -1)
            cache.unpin()
        now = cache.counters()
    missed = now.misses + now.first_touches - earlier.misses - earlier.first_touches
    return missed / (len(batches) - middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows-per-table", type=int, default=40_000)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--share", type=float, default=0.25, help="Share of the rows that fit in memory.")
    options = parser.parse_args()
    rows = NUM_TABLES * options.rows_per_table
    slots = int(rows * options.share)
    batches = [keys.astype(np.int64) for keys in zipf_batches(options.batches, options.rows_per_table, True)]
    found = {"optimal": optimal_misses(batches, rows, slots)}
    for lookahead in (0, 16, 128):
        found[f"lookahead_{lookahead}"] = our_misses(batches, rows, slots, lookahead)
    for name, misses in found.items():
        print(f"{name:14} {misses:8,.0f} misses per batch, {misses / found['optimal']:.2f} times the optimal cache")
    print(json.dumps({"benchmark": "store_reads"} | {name: round(misses) for name, misses in found.items()}))


if __name__ == "__main__":
    main()
