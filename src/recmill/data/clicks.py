"""Make this rank's batches of a prepared click log, straight from its files."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import islice, pairwise
from types import MappingProxyType

import numpy as np
import torch

from recmill import rng
from recmill.batch import CtrBatch
from recmill.data.checks import ClickChecks
from recmill.data.click_batches import BatchMaker
from recmill.data.click_rows import BLOCK_ROWS, Block, ClickRows, DecodeBlock, StoredDay, block_decoder, concatenate
from recmill.data.multi_hot import MultiHot
from recmill.data.share import Batching, Share
from recmill.errors import DataError
from recmill.schema import MAX_TABLE_ROWS, Dataset

_WINDOW_BLOCKS = 16  # blocks of Parquet that are shuffled together: a million rows
_CACHED_BLOCKS = 36  # a batch reads from up to two windows, which may begin and end within a block


class SplitRows:
    """The rows of a split, numbered from 0 over all its ranges. Every value is checked when it is read."""

    def __init__(self, dataset: Dataset, split: str, decode: DecodeBlock | None = None) -> None:
        self._dataset = dataset
        self._path = dataset.path
        self._split = split
        self._checks = ClickChecks(dataset.clicks)
        self._ranges = dataset.clicks.splits[split]
        self._starts = np.cumsum([0, *(r.stop - r.start for r in self._ranges)])
        # By range: a row's number in the files minus its number in the split.
        self._shifts = [r.start - start for r, start in zip(self._ranges, self._starts[:-1].tolist(), strict=True)]
        self._index_type = np.uint16 if len(self._ranges) <= 1 << 16 else np.int64  # NumPy sorts 16 bits faster
        days = {r.day: StoredDay(dataset, r.day, decode) for r in self._ranges}
        self._days = [days[r.day] for r in self._ranges]

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def weights(self) -> np.ndarray | None:
        """The weight of each row, float32; None if all count the same."""
        description = self._dataset.clicks
        if not description.weights:
            return None
        parts = [self._dataset.array(description.weights_file(r.day))[r.start : r.stop] for r in self._ranges]
        found = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if not len(found) or not np.isfinite(found).all() or found.min() < 0 or not found.any():
            raise DataError(
                f"{self._path}: the weights of split {self._split} must be finite, not negative, not all 0. Correct "
                "the column of weights, and prepare the dataset again."
            )
        return found

    def groups(self, column: str) -> np.ndarray:
        """Return the number of each row's value in a kept column, int64 from 1; 0: it has none."""
        import polars as pl

        files = {r.day: self._path / self._dataset.clicks.keep_file(r.day) for r in self._ranges}
        columns = {day: pl.read_parquet(file, columns=[column], glob=False)[column] for day, file in files.items()}
        values = pl.concat([columns[r.day][r.start : r.stop] for r in self._ranges])
        return values.rank("dense").fill_null(0).cast(pl.Int64).to_numpy()

    def take(self, rows: np.ndarray) -> ClickRows:
        """Return these rows, in this order. Consecutive rows may be views of read-only files."""
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            return self._between(int(rows[0]), int(rows[-1]) + 1)
        which = np.searchsorted(self._starts, rows, side="right") - 1
        if len(self._ranges) == 1 or (which == which[0]).all():
            return self._checked(which[0], rows + self._shifts[which[0]])
        order = np.argsort(which.astype(self._index_type), kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(self._ranges)))[:-1]
        parts = [
            self._checked(index, rows[chosen] + self._shifts[index])
            for index, chosen in enumerate(np.split(order, ends))
            if len(chosen)
        ]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return concatenate(parts)[back]

    def _between(self, start: int, stop: int) -> ClickRows:
        parts = []
        for index, (first, end) in enumerate(pairwise(self._starts.tolist())):
            if start < end and stop > first:
                shift = self._shifts[index]
                parts.append(self._checked(index, range(max(start, first) + shift, min(stop, end) + shift)))
        return concatenate(parts)

    def _checked(self, index: int, numbers: range | np.ndarray) -> ClickRows:
        """Return rows of a range by their numbers in the files. For bad ids FBGEMM would silently train wrong rows."""
        rows = slice(numbers.start, numbers.stop) if isinstance(numbers, range) else numbers
        found = self._days[index].take(rows)
        if bad := self._checks.find(Block(self._split, self._ranges[index].day, numbers, found)):
            remedy = " with the right table sizes" if bad[0].kind == "id" else ""
            raise DataError(f"{self._path}/{bad[0]}. Prepare the dataset again{remedy}.")
        return found


class ChosenRows:
    """Some rows of a split, numbered from 0."""

    def __init__(self, rows: SplitRows, numbers: np.ndarray) -> None:
        self._rows = rows
        self._numbers = numbers
        self.weights = None if rows.weights is None else rows.weights[numbers]

    def __len__(self) -> int:
        return len(self._numbers)

    def take(self, rows: np.ndarray) -> ClickRows:
        return self._rows.take(self._numbers[rows])


def with_weight(rows: SplitRows) -> SplitRows | ChosenRows:
    """Leave out rows of weight 0: a batch of nothing else has no loss, and optimizers change every row of a table that
    is looked up."""
    if rows.weights is None or rows.weights.all():
        return rows
    return ChosenRows(rows, np.flatnonzero(rows.weights))


class WindowedOrder:
    """A permutation of range(size), given by the key, in which neighbours come from few blocks of Parquet files.

    It permutes the blocks, then the rows within each window of _WINDOW_BLOCKS blocks.
    """

    def __init__(self, size: int, key: np.uint64) -> None:
        num_blocks = -(-size // BLOCK_ROWS)
        blocks = rng.Permutation(num_blocks, key)(np.arange(num_blocks))
        lengths = np.minimum(BLOCK_ROWS, size - blocks * BLOCK_ROWS)
        self._rows_of_block = blocks * BLOCK_ROWS
        self._block_starts = np.cumsum([0, *lengths])
        self._window_starts = np.append(self._block_starts[:-1:_WINDOW_BLOCKS], size)
        self._key = int(key)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        mixed = np.empty_like(positions)
        windows = np.searchsorted(self._window_starts, positions, side="right") - 1
        for window in np.unique(windows):
            is_inside = windows == window
            start = self._window_starts[window]
            size = int(self._window_starts[window + 1] - start)
            permutation = rng.Permutation(size, rng.stream_key(self._key, int(window)))
            mixed[is_inside] = permutation(positions[is_inside] - start) + start
        block = np.searchsorted(self._block_starts, mixed, side="right") - 1
        return self._rows_of_block[block] + mixed - self._block_starts[block]


class ClickSource:
    def __init__(
        self,
        dataset: Dataset,
        batching: Batching,
        multi_hot: MultiHot | None = None,
        dynamic: Collection[str] = (),
        padding: Mapping[str, int] = MappingProxyType({}),
        with_row_keys: bool = False,
        group: str = "",
    ) -> None:
        """`dynamic`: the features whose tables are dynamic. Their ids become keys, and fillers have none of them.

        `padding`: ids of other features that stand for no id, by feature. Batches leave them out. `with_row_keys`:
        training batches have `row_keys_B`; `group`: a kept column, by which evaluation batches have groups.
        """
        description = dataset.clicks
        huge = [f.name for f in description.sparse if f.rows > MAX_TABLE_ROWS and f.name not in dynamic]
        if huge:
            raise DataError(
                f"{dataset.path}: the ids of {', '.join(huge)} are 64-bit hashes, too many for a table. "
                "Make their tables dynamic (tables.dynamic), or prepare the dataset with --table-size as well."
            )
        self._dataset = dataset
        self.negatives = description.negatives
        self._batching = batching
        self._features = [feature.name for feature in description.sparse]
        self._multi_hot = multi_hot
        self._with_row_keys, self._group = with_row_keys, group
        self._maker = BatchMaker(description, multi_hot, dynamic, padding)
        self._permutation = WindowedOrder if description.layout == "parquet" else rng.Permutation
        self._decode = block_decoder(description, _CACHED_BLOCKS)
        self._train = with_weight(SplitRows(dataset, "train", self._decode))
        self.samples_per_epoch = batching.num_used("train", len(self._train))
        self.batches_per_epoch = batching.num_batches("train", self.samples_per_epoch)

    def train_batches(self, epoch: int, first: int) -> Iterator[CtrBatch]:
        """Yield batch `first` of the epoch and all later ones; their order depends on seed and epoch alone."""
        for share, rows in self._train_shares(self._batching, epoch, first):
            batch = self._batch(self._train, share, rows)
            if self._with_row_keys:
                keys = rng.bits(rng.stream_key(self._batching.seed, "rows", epoch), rows) >> np.uint64(1)
                keys = np.where(np.arange(len(rows)) < share.num_real, keys.view(np.int64), -1)
                batch.row_keys_B = torch.from_numpy(keys)
            yield batch

    def global_ids(self, epoch: int, batch: int) -> dict[str, np.ndarray]:
        """Return the ids of all ranks in a training batch.

        Blocks of Parquet files are decoded once for this and for training, unless it is more than a window ahead.
        """
        _, rows = next(self._train_shares(replace(self._batching, rank=0, size=1), epoch, batch))
        return self._maker.ids(self._train.take(rows))

    def _train_shares(self, batching: Batching, epoch: int, first: int) -> Iterator[tuple[Share, np.ndarray]]:
        """Yield a rank's share of each batch, and the row at each of its positions."""
        permutation = self._permutation(len(self._train), rng.stream_key(batching.seed, "order", epoch))
        for share in batching.shares("train", self.samples_per_epoch, first):
            rows = share.positions
            if batching.order == "shuffled":
                rows = permutation(rows)
            elif batching.order == "batch":
                rows = batching.permuted_within_batch(rows, self.samples_per_epoch, epoch)
            yield share, rows

    def id_counts(self, epoch: int, batch: int) -> list[np.ndarray]:
        """Count the stored ids in this rank's batches before (epoch, batch): int64 [table rows] by feature.

        The batches are read again, so neither prefetching nor an interruption can distort the counts.
        """
        counts = [np.zeros(feature.rows, dtype=np.int64) for feature in self._dataset.clicks.sparse]
        for earlier in range(epoch + 1):
            shares = self._train_shares(self._batching, earlier, 0)
            for share, rows in islice(shares, batch if earlier == epoch else None):
                if not share.num_real:
                    continue
                for count, ids in zip(counts, self._train.take(rows[: share.num_real]).ids.T, strict=True):
                    np.add.at(count, ids, 1)
        return counts

    def frequencies(self, counts: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Name counts of stored ids: NAME.before as they are, NAME.after with the companions of each id."""
        assert self._multi_hot
        named: dict[str, np.ndarray] = {}
        for index, (name, count) in enumerate(zip(self._features, counts, strict=True)):
            named |= {f"{name}.before": count, f"{name}.after": self._multi_hot.counts_after(index, count)}
        return named

    def eval_batches(self, split: str) -> Iterator[CtrBatch]:
        """Yield all batches of a split, in file order."""
        rows = SplitRows(self._dataset, split, self._decode)
        groups = rows.groups(self._group) if self._group else None
        for share in self._batching.shares(split, self._batching.num_used(split, len(rows))):
            batch = self._batch(rows, share, share.positions)
            batch.numbers_B = torch.from_numpy(share.positions)
            if groups is not None:
                batch.groups_B = torch.from_numpy(groups[share.positions])
            yield batch

    def num_eval_batches(self, split: str) -> int:
        rows = sum(r.stop - r.start for r in self._dataset.clicks.splits[split])
        return self._batching.num_batches(split, self._batching.num_used(split, rows))

    def _batch(self, rows: SplitRows | ChosenRows, share: Share, numbers: np.ndarray) -> CtrBatch:
        weights = share.weights()
        if rows.weights is not None:
            weights *= rows.weights[numbers]
        return self._maker.batch(rows.take(numbers), share.num_real, weights)
