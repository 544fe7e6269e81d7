"""Tell the caches of tables in cached_ssd which rows coming batches need, so that steps wait less for the disk."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from torch import nn

from recmill.checkpoints.format import Position
from recmill.errors import UserError
from recmill.protocols import BatchSource
from recmill.tables.cached_tables import CachedTables
from recmill.tables.stores.row_cache import RowCache
from recmill.tables.table_lookup import cached_tables

Ids = dict[str, np.ndarray]  # of a global batch, by feature


@contextmanager
def looking_ahead(model: nn.Module, source: BatchSource, start: Position, num_steps: int) -> Iterator[None]:
    """Within the block, which trains from `start` on, a thread hints the rows of coming batches, up to the last step.

    Every rank reads the ids of all ranks and keeps those of its own rows. Results never depend on hints.
    """
    caches = [c for c in cached_tables(model) if c.looks_ahead and c.cache.plan.slots < c.cache.layout.rows]
    if not caches:
        yield
        return

    def ids_of(step: int) -> Ids:
        done = start.epoch * source.batches_per_epoch + start.batch + step - start.step
        return source.global_ids(*divmod(done, source.batches_per_epoch))

    is_over = threading.Event()
    for cached in caches:
        cached.next_batch = start.step
    steps = range(start.step, num_steps)
    thread = threading.Thread(target=_hint, args=(caches, ids_of, steps, is_over), name="look-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        for cached in caches:
            cached.has_pinned.set()
        thread.join()
        for cached in caches:
            assert isinstance(cached.cache, RowCache)
            cached.cache.drop_hints()
            cached.next_batch = -1


def _hint(caches: list[CachedTables], ids_of: Callable[[int], Ids], steps: range, is_over: threading.Event) -> None:
    step = steps.start
    while step < steps.stop and not is_over.is_set():
        try:
            ids = ids_of(step)
        except UserError:
            return  # raised again where the batch is used
        for cached in caches:
            assert isinstance(cached.cache, RowCache)
            keys = cached.own_keys(ids)
            while step >= cached.next_batch and not is_over.is_set():
                cached.has_pinned.clear()
                if cached.cache.hint(step, keys):
                    break
                if not is_over.is_set():  # it is set before `has_pinned`
                    cached.has_pinned.wait()
        step = max(step + 1, *(cached.next_batch for cached in caches))  # what is trained already needs no hint
