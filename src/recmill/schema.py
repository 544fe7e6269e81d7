"""The contract of a prepared dataset: what `dataset.json` holds. `recmill.data.opening` checks the files against it.

`dataset.json` is written last: a directory without it is not a dataset. There are two kinds: `clicks` (one row per
impression, in TorchRec's npy layout or in Parquet) and `histories` (one sequence of items per user).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, TypeAdapter

DESCRIPTION_FILE = "dataset.json"
SPLITS = ("train", "val", "test")
UNLABELLED = "unlabelled"  # a split of click logs beside those: rows whose labels are all -1
MAX_TABLE_ROWS = 2**40  # larger "tables" are the range of 64-bit hashes, which no real table can cover


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileInfo(_Strict):
    bytes: NonNegativeInt
    rows: NonNegativeInt
    xxh3: str  # xxh3_128 of the file's bytes


class SparseFeature(_Strict):
    name: str
    rows: PositiveInt  # ids are 0..rows-1
    first_id: int = 0  # smallest id in the files: stored id - first_id is the row of the table


class SourceFile(_Strict):
    """A raw file that the dataset was made from. `sample` digests parts of it, to notice changes quickly."""

    name: str
    bytes: NonNegativeInt
    rows: NonNegativeInt
    bad_rows: NonNegativeInt = 0  # skipped
    sample: str


class RowRange(_Strict):
    """Rows start..stop of a day, without `stop` itself.

    A day is the files day_dense.npy, day_sparse.npy (or day_sparse_multi_hot.npz) and day_labels.npy, or day.parquet.
    """

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


class ClicksDescription(_Description):
    """A click log. Besides train, val and test it may have the split `unlabelled`."""

    kind: Literal["clicks"] = "clicks"
    layout: Literal["npy", "parquet"] = "npy"
    dense: list[str]
    dense_stored: Literal["ready", "plus-one"] = "ready"  # plus-one: x + 1 is stored, a model gets log(x + 2)
    sparse: list[SparseFeature]
    multi_hot: list[PositiveInt] = []  # ids per row of each sparse feature; empty: one each
    splits: dict[str, list[RowRange]]
    source: list[SourceFile] = []

    def day_files(self, day: str) -> list[str]:
        if self.layout == "parquet":
            return [f"{day}.parquet"]
        return [f"{day}_dense.npy", self.sparse_file(day), f"{day}_labels.npy"]

    def sparse_file(self, day: str) -> str:
        if self.layout == "parquet":
            return f"{day}.parquet"
        return f"{day}_sparse_multi_hot.npz" if self.multi_hot else f"{day}_sparse.npy"

    @property
    def ids_per_row(self) -> list[int]:
        """How many ids a row holds, by sparse feature."""
        return self.multi_hot or [1] * len(self.sparse)

    @property
    def days(self) -> list[str]:
        return list(dict.fromkeys(r.day for ranges in self.splits.values() for r in ranges))


class HistoriesDescription(_Description):
    """Histories of users 0..num_users-1. Items are numbered 1..num_items; 0 is padding.

    Splits are leave-one-out by position: the last item of a history is its test target, the one before it the
    validation target, and the rest is for training.
    """

    kind: Literal["histories"] = "histories"
    num_users: PositiveInt
    num_items: PositiveInt
    num_interactions: PositiveInt
    has_timestamps: bool = False


Description = ClicksDescription | HistoriesDescription
_ADAPTER: TypeAdapter[Description] = TypeAdapter(Annotated[Description, Field(discriminator="kind")])


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset whose files were checked: its directory and the content of its dataset.json."""

    path: Path
    description: Description
    fingerprint: str  # digest of dataset.json, which holds the digests of all files

    @property
    def clicks(self) -> ClicksDescription:
        """The description, where only click logs occur."""
        assert isinstance(self.description, ClicksDescription)
        return self.description

    def array(self, file: str) -> np.ndarray:
        """Memory-map an npy file of the dataset: pages are read when they are used."""
        return np.load(self.path / file, mmap_mode="r", allow_pickle=False)


def to_json(description: Description) -> str:
    """Return the text of dataset.json."""
    return json.dumps(description.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def from_json(text: bytes) -> Description:
    """Parse the content of dataset.json. Raises pydantic's ValidationError."""
    return _ADAPTER.validate_json(text)
