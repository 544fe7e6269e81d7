"""Rows of a click log -> the batch that a network reads, in training, evaluation and prediction."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill import rng
from recmill.batch import CtrBatch
from recmill.data.click_rows import ClickRows
from recmill.data.multi_hot import MultiHot
from recmill.schema import ClicksDescription

_NO_ID = -1


class BatchMaker:
    def __init__(
        self,
        description: ClicksDescription,
        multi_hot: MultiHot | None = None,
        dynamic: Collection[str] = (),
        padding: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`dynamic`, `padding`: as for ClickSource."""
        self._description = description
        self._features = [feature.name for feature in description.sparse]
        self._dynamic = [i for i, name in enumerate(self._features) if name in dynamic]
        self._multi_hot = multi_hot
        self._ids_per_row = multi_hot.sizes if multi_hot else description.ids_per_row
        self._padding = [padding.get(name, _NO_ID) for name in self._features] if padding else None
        self._layouts: dict[tuple[int, tuple[int, ...]], tuple[torch.Tensor, torch.Tensor]] = {}

    def ids(self, found: ClickRows) -> dict[str, np.ndarray]:
        """Return all ids of these rows by feature."""
        ends = np.cumsum([len(found) * ids for ids in self._ids_per_row])
        by_feature = np.split(self._values(found.ids), ends[:-1])
        if self._padding:
            by_feature = [ids[ids != padding] for ids, padding in zip(by_feature, self._padding, strict=True)]
        return dict(zip(self._features, by_feature, strict=True))

    def batch(
        self, found: ClickRows, num_real: int, weights: np.ndarray, is_used: np.ndarray | None = None
    ) -> CtrBatch:
        """Return a batch of these rows. Those behind the first `num_real` are fillers, whose weight is 0.

        `is_used` [features, rows]: whose ids are in the batch; None: of all.
        """
        count = len(found)
        values, bags = self._values(found.ids), [count] * len(self._features)
        if self._dynamic and num_real < count:
            values, bags = self._without_fillers(values, count, num_real)
        lengths, offsets = self._layout(count, tuple(bags))
        # else TorchRec sums lengths at every step
        length_per_key = [n * ids for n, ids in zip(bags, self._ids_per_row, strict=True)]
        if self._padding or is_used is not None:
            is_id = values != np.repeat(self._padding or _NO_ID, length_per_key if self._padding else len(values))
            if is_used is not None:
                is_id &= is_used.reshape(-1).repeat(np.repeat(self._ids_per_row, count))
            values = values[is_id]
            offsets = F.pad(torch.from_numpy(is_id).cumsum(0, dtype=torch.int32), (1, 0))[offsets.long()]
            lengths = offsets.diff()
            length_per_key = [int(part.sum()) for part in np.split(is_id, np.cumsum(length_per_key)[:-1])]
        sparse = KeyedJaggedTensor(
            keys=self._features,
            values=torch.from_numpy(values),
            lengths=lengths,
            offsets=offsets,
            stride=count,
            length_per_key=length_per_key,
        )
        dense = found.dense if found.dense.flags.writeable else found.dense.copy()
        labels = found.labels.astype(np.float32)
        return CtrBatch(torch.from_numpy(dense), sparse, torch.from_numpy(labels), torch.from_numpy(weights))

    def _values(self, stored: np.ndarray) -> np.ndarray:
        """Return all ids of a batch as int64, feature after feature."""
        count = len(stored)
        values = np.empty(sum(self._ids_per_row) * count, dtype=np.int64)
        if max(self._ids_per_row) == 1:
            values.reshape(-1, count)[:] = stored.T
            return self._with_keys(values, count)
        multi_hot = self._multi_hot
        for feature, (end, size) in enumerate(zip(np.cumsum(self._ids_per_row), self._ids_per_row, strict=True)):
            ids = multi_hot.of(feature, stored[:, feature]) if multi_hot else stored[:, end - size : end]
            values[(end - size) * count : end * count].reshape(count, size)[:] = ids
        return self._with_keys(values, count)

    def _with_keys(self, values: np.ndarray, count: int) -> np.ndarray:
        """Replace the ids of dynamic tables in `values` with keys. Of 64-bit hashes, 62 bits are used."""
        ends = np.cumsum(self._ids_per_row) * count
        for feature in self._dynamic:
            own = values[ends[feature] - self._ids_per_row[feature] * count : ends[feature]]
            is_hash = self._description.sparse[feature].rows > rng.NUM_KEYS
            own[:] = rng.keys_of_ids(own.view(np.uint64) >> np.uint64(2) if is_hash else own)
        return values

    def _without_fillers(self, values: np.ndarray, count: int, num_real: int) -> tuple[np.ndarray, list[int]]:
        """Leave out the ids of fillers in dynamic tables, which would count them. Return ids, and bags by feature."""
        bags = [num_real if feature in self._dynamic else count for feature in range(len(self._features))]
        parts = np.split(values, np.cumsum(self._ids_per_row)[:-1] * count)
        kept = [part[: n * ids] for part, n, ids in zip(parts, bags, self._ids_per_row, strict=True)]
        return np.concatenate(kept), bags

    def _layout(self, count: int, bags: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (lengths, offsets) of a batch of `count` rows, of which the first `bags` of each feature have ids.

        They are kept, because making them takes longer than the ids.
        """
        if (count, bags) not in self._layouts:
            lengths = np.zeros((len(bags), count), dtype=np.int32)
            for of_feature, num_bags, ids in zip(lengths, bags, self._ids_per_row, strict=True):
                of_feature[:num_bags] = ids
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            self._layouts[count, bags] = torch.from_numpy(lengths.reshape(-1)), torch.from_numpy(offsets)
        return self._layouts[count, bags]
