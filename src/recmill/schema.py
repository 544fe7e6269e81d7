"""The content of `dataset.json`, which describes a prepared dataset and is the last of its files to be written.

There are two kinds: `clicks` (one row per impression, in TorchRec's npy layout, in Parquet or in records) and
`histories` (one sequence of items per user).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter

DESCRIPTION_FILE = "dataset.json"
SPLITS = ("train", "val", "test")
UNLABELLED = "unlabelled"  # a fourth split, only in click logs: rows whose labels are all -1
RECORDS = "_data.bin"  # how the names of files in layout bin end: train_data.bin, validation_data.bin, test_data.bin
MAX_TABLE_ROWS = 2**40  # a larger `rows` is the range of 64-bit hashes, too many for a real table


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileInfo(_Strict):
    bytes: NonNegativeInt
    rows: NonNegativeInt
    xxh3: str  # xxh3_128 of the file's bytes


Role = Literal["user", "item", "context"]  # whom a feature describes


class SparseFeature(_Strict):
    name: str
    rows: PositiveInt  # ids are 0..rows-1
    first_id: int = 0  # smallest id in the files: row of the table = id in the files - first_id
    share_table: str | None = None  # the feature whose table it uses: both have the same ids
    padding_id: NonNegativeInt | None = None  # an id that stands for no id
    pooling: Literal["sum", "mean"] | None = None  # of the vectors of a row's ids; None: sum
    role: Role | None = None  # None: not said


class SourceFile(_Strict):
    name: str
    bytes: NonNegativeInt
    rows: NonNegativeInt
    bad_rows: NonNegativeInt = 0  # skipped
    sample: str  # digest of parts of the file, to notice changes quickly
    smallest_dense: int | None = None  # if dense values were transformed by it


class RowRange(_Strict):
    """Rows start..stop-1 of the files that `ClicksDescription.day_files` returns for `day`."""

    day: str
    start: NonNegativeInt
    stop: NonNegativeInt


class _Description(_Strict):
    format: Literal[1] = 1
    name: str
    made_by: str
    recipe: dict[str, Any]  # the options of `prepare`: the same recipe gives the same bytes
    files: dict[str, FileInfo]
    truth: dict[str, dict[str, float]] = {}  # split -> metric -> the best value that any model can reach
    notes: list[str] = []  # what was dropped or changed during preparation


# bin: a record per row, int32 label, float32 dense values, int32 ids, as TorchRec's scripts for NVTabular write them.
ClicksLayout = Literal["npy", "parquet", "bin"]


class ClicksDescription(_Description):
    kind: Literal["clicks"] = "clicks"
    layout: ClicksLayout = "npy"
    dense: list[str]
    dense_roles: dict[str, Role] = {}  # of those dense features whose role is known
    dense_stored: Literal["ready", "plus-one"] = "ready"  # plus-one: the files hold x + 1, a model gets log(x + 2)
    sparse: list[SparseFeature]
    multi_hot: list[PositiveInt] = []  # ids per row of each sparse feature; empty: one each
    modulo: Literal[True] | None = None  # row of the table = id in the files modulo the rows of the table
    splits: dict[str, list[RowRange]]  # train, val, test and UNLABELLED
    keep: list[str] = []  # the columns of `keep_file`, which no model reads: of users, for example
    weights: bool = False  # whether rows have weights: `weights_file`
    negatives: float = 1.0  # the share of training rows without a click that was kept: the others are not stored
    source: list[SourceFile] = []

    def day_files(self, day: str) -> tuple[str, str, str]:
        """Return the files with a day's dense values, ids and labels: but for npy the same file three times."""
        if self.layout != "npy":
            file = f"{day}.parquet" if self.layout == "parquet" else f"{day}{RECORDS}"
            return file, file, file
        sparse = f"{day}_sparse_multi_hot.npz" if self.multi_hot else f"{day}_sparse.npy"
        return f"{day}_dense.npy", sparse, f"{day}_labels.npy"

    def weights_file(self, day: str) -> str:
        """Return the file with the weight of each of a day's rows: float32 [n], finite and not negative."""
        return f"{day}_weights.npy"

    def keep_file(self, day: str) -> str:
        """Return the Parquet file with the columns `keep` of each of a day's rows, as they were in the log."""
        return f"{day}_keep.parquet"

    @property
    def record_words(self) -> int:
        """How many words of four bytes a row has in layout bin."""
        return 1 + len(self.dense) + len(self.sparse)

    @property
    def ids_per_row(self) -> list[int]:
        """How many ids a row holds, by sparse feature."""
        return self.multi_hot or [1] * len(self.sparse)


class HistoriesDescription(_Description):
    """Items are 1..num_items; 0 is padding. The last item of a history is for test, the one before it for val."""

    kind: Literal["histories"] = "histories"
    num_users: PositiveInt
    num_items: PositiveInt
    num_interactions: PositiveInt
    has_timestamps: bool = False


Description = ClicksDescription | HistoriesDescription
_ADAPTER: TypeAdapter[Description] = TypeAdapter(Annotated[Description, Field(discriminator="kind")])


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset, as `recmill.data.opening` opens it."""

    path: Path
    description: Description
    fingerprint: str  # digest of dataset.json, which holds the digests of all files

    @property
    def clicks(self) -> ClicksDescription:
        assert isinstance(self.description, ClicksDescription)
        return self.description

    @property
    def histories(self) -> HistoriesDescription:
        assert isinstance(self.description, HistoriesDescription)
        return self.description

    def array(self, file: str) -> np.ndarray:
        """Memory-map an npy file of the dataset: pages are read when they are used."""
        return np.load(self.path / file, mmap_mode="r", allow_pickle=False)


def to_json(description: Description) -> str:
    return json.dumps(description.model_dump(mode="json", exclude_none=True), indent=1, ensure_ascii=False) + "\n"


def from_json(text: bytes) -> Description:
    """Parse dataset.json, or raise pydantic's ValidationError."""
    return _ADAPTER.validate_json(text)
