"""The ids of parsed rows by the rules of a prepared dataset."""

import numpy as np

from recmill.datasets.click_log import LogBlock
from recmill.datasets.criteo.options import CRITEO, Rules
from recmill.datasets.hashed_ids import hash64, hashed_modulo, modulo, modulo_as_oneflow, modulo_as_torchrec
from recmill.datasets.vocabularies import LookupRound


def ids_of(
    block: LogBlock, rules: Rules, lookup: LookupRound | None = None, id_type: type | np.dtype = np.int64
) -> np.ndarray:
    """Return ids [n, 26] as they are stored; contiguous ones come from `lookup`, and are of `id_type`."""
    sizes = np.array(rules.table_size or [2**32] * CRITEO.num_sparse)
    if rules.ids == "contiguous":
        assert lookup
        ids = np.empty((len(block), CRITEO.num_sparse), id_type)
        lookup.map(block, ids)
        return ids
    if rules.ids == "hash64":
        return hashed_modulo(block, sizes) if rules.table_size else hash64(block)
    if rules.compat == "oneflow":
        return modulo_as_oneflow(block, rules.table_size[0])
    return modulo_as_torchrec(block, sizes) if rules.compat else modulo(block, sizes)
