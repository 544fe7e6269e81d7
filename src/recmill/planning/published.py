"""Descriptions of datasets that are not here: from numbers of rows that were given, or from published ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recmill import registry
from recmill.errors import ConfigError
from recmill.files.reading import read_small
from recmill.schema import (
    MAX_TABLE_ROWS,
    SPLITS,
    ClicksDescription,
    Dataset,
    Description,
    HistoriesDescription,
    RowRange,
    SparseFeature,
)

# Distinct ids of each column of Criteo 1TB over all days, as TorchRec and MLPerf count them.
_CRITEO = [227605432, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 130229467, 3067956, 405282, 10, 2209, 11938, 155]
_CRITEO += [4, 976, 14, 292775614, 40790948, 187188510, 590152, 12973, 108, 36]
_KAGGLE = [1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10]
_KAGGLE += [5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572]
_MULTI_HOT = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
_DAYS = (4_195_197_692, 89_137_319, 89_137_318)  # rows of train, val and test
# `recmill prepare criteo --shuffle global`, measured on two cores with ten million rows: docs/data.md.
PREPARED_ROWS_PER_S = 450_000


@dataclass(frozen=True)
class Sizes:
    """Rows of each table, or the number of items; samples of each split."""

    rows: Sequence[int]
    samples: tuple[int, int, int] = (0, 0, 0)
    ids_per_row: Sequence[int] = ()
    interactions: int = 0  # of histories

    @property
    def bytes(self) -> int:
        """The size of prepared click logs: a label, 13 dense values and ids of 4 bytes."""
        return 4 * (14 + sum(self.ids_per_row or [1] * len(self.rows))) * sum(self.samples)


def _capped(most: int) -> list[int]:
    return [min(rows, most) for rows in _CRITEO]


# By the last part of data.path in the shipped configs.
PUBLISHED = {
    "criteo_1tb_40m": Sizes(_capped(40_000_000), _DAYS),
    "criteo_1tb_80m": Sizes(_capped(80_000_000), _DAYS),
    "criteo_1tb_full": Sizes(_CRITEO, _DAYS),
    "criteo_1tb_multi_hot": Sizes(_capped(40_000_000), _DAYS, _MULTI_HOT),
    "criteo_kaggle": Sizes(_KAGGLE, (36_672_493, 4_584_062, 4_584_062)),
    "ml-1m": Sizes([3_416], (6_040, 6_040, 6_040), interactions=999_611),
    "ml-1m-every-item": Sizes([3_706], (6_040, 6_040, 6_040), interactions=1_000_209),
}


def read_sizes(text: str) -> Sizes:
    """Return the sizes that --rows gives: numbers separated by commas, the name of a dataset, or a file of numbers."""
    if text in PUBLISHED:
        return PUBLISHED[text]
    numbers = text
    if not text.replace(",", "").replace(" ", "").isdigit():
        try:
            numbers = read_small(Path(text)).decode("utf-8", errors="replace")
        except ValueError as error:
            raise ConfigError(f"--rows {text}: {error}. Give a file with a number for each table.") from None
        except FileNotFoundError:
            fact = registry.unknown("dataset or file", text, PUBLISHED)
            raise ConfigError(f"--rows: {fact} Or give the rows of each table: --rows 40000000,39060.") from None
    try:
        rows = [int(part) for part in numbers.replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(f"--rows {text}: {error}. Give a number for each table.") from None
    if not rows or min(rows) < 1 or max(rows) > MAX_TABLE_ROWS:
        raise ConfigError(f"--rows {text}: a table has 1 to {MAX_TABLE_ROWS:,} rows. Give a number for each table.")
    return Sizes(rows)


def described(sizes: Sizes, kind: str, path: str) -> Dataset:
    """Return a dataset without files, of this kind: 'clicks' or 'histories'."""
    facts: dict[str, Any] = {"name": "planned", "made_by": "recmill plan", "recipe": {}, "files": {}}
    description: Description
    if kind == "histories":
        if len(sizes.rows) != 1:
            raise ConfigError(f"--rows has {len(sizes.rows)} numbers, and a sequence model has one table. Give one.")
        (items,) = sizes.rows
        users = sizes.samples[0] or 1
        description = HistoriesDescription(
            **facts, num_users=users, num_items=items, num_interactions=sizes.interactions or users
        )
    else:
        sparse = [SparseFeature(name=f"C{number}", rows=rows) for number, rows in enumerate(sizes.rows, start=1)]
        if sizes.ids_per_row and len(sizes.ids_per_row) != len(sparse):
            fact = f"--ids-per-row has {len(sizes.ids_per_row)} numbers, and --rows {len(sparse)}"
            raise ConfigError(f"{fact}. Give one for each table.")
        splits = dict(zip(SPLITS, sizes.samples, strict=True))
        description = ClicksDescription(
            **facts,
            dense=[f"I{number}" for number in range(1, 14)],
            sparse=sparse,
            multi_hot=list(sizes.ids_per_row),
            splits={split: [RowRange(day="day_0", start=0, stop=rows)] for split, rows in splits.items()},
        )
    return Dataset(Path(path), description, fingerprint="")
