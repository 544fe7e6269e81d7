"""Read checkpoints without executing anything in them: torch would read `.metadata` with plain pickle.

Of large tensors only the rows that are needed are read, in pieces: torch would load a stored tensor completely first.
"""

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from recmill.checkpoints.format import Checkpoint
from recmill.errors import CheckpointError
from recmill.tables.torchrec_internals import METADATA_CLASSES, stored_tensor, table_of

_PIECE_BYTES = 1 << 24  # read at a time
_TRUST = "Do not load checkpoints from people you do not trust."


class SafeReader(dcp.FileSystemReader):
    """Accept only `.metadata` that describes tensors in files of the same directory."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _DataUnpickler(io.BytesIO(path.read_bytes())).load()
            has_objects = any(isinstance(d, BytesStorageMetadata) for d in metadata.state_dict_metadata.values())
            names = {str(stored.relative_path) for stored in metadata.storage_data.values()}
        except Exception as error:  # corrupt bytes can make a pickle fail in any way
            raise CheckpointError(f"{path}: {error or type(error).__name__}. {_TRUST}") from error
        if has_objects:
            raise CheckpointError(f"{path}: holds pickled objects besides tensors. {_TRUST}")
        for name in names:
            if "/" in name or not (path.parent / name).is_file():
                raise CheckpointError(f"{path}: points to '{name}', which is no file of this checkpoint. {_TRUST}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        small: list[ReadItem] = []
        for item in plan.items:
            if self.storage_data[item.storage_index].length <= _PIECE_BYTES or not self._read_rows(item, planner):
                small.append(item)
        return super().read_data(replace(plan, items=small), planner)

    def _read_rows(self, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read the rows that `item` asks for, a piece at a time. Return False if they are not one after the other."""
        stored = self.storage_data[item.storage_index]
        with (Path(self.path) / stored.relative_path).open("rb", buffering=0) as file:
            described, offset = stored_tensor(file, stored.offset, stored.length)
            if described.dim() == 0 or not described.is_contiguous():
                return False
            row_shape = described.shape[1:]
            row_bytes = row_shape.numel() * described.element_size()
            target = planner.resolve_tensor(item).detach()
            (first, *columns), (count, *widths) = item.storage_offsets, item.lengths
            rows = torch.empty(max(1, _PIECE_BYTES // max(row_bytes, 1)), *row_shape, dtype=described.dtype)
            for begin in range(0, count, len(rows)):
                piece = rows[: count - begin]
                file.seek(offset + (first + begin) * row_bytes)
                _fill(piece, file)
                for dim, (column, width) in enumerate(zip(columns, widths, strict=True), start=1):
                    piece = piece.narrow(dim, column, width)
                target[begin : begin + len(piece)] = piece
            planner.commit_tensor(item, target)
        return True


def _fill(values: torch.Tensor, file: io.FileIO) -> None:
    view = values.view(torch.uint8).numpy().reshape(-1).data
    while view:
        count = file.readinto(view)
        if not count:
            raise OSError(f"{file.name} ends too early")
        view = view[count:]


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which is not data")


def described_tensors(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe all tensors by key. The table rows of an incremental checkpoint are those of its base."""
    own = SafeReader(checkpoint.path).read_metadata().state_dict_metadata
    tensors = {key: tensor for key, tensor in own.items() if key.startswith(("model.", "optim."))}
    if checkpoint.base:
        base = SafeReader(checkpoint.base).read_metadata().state_dict_metadata
        tensors |= {key: tensor for key, tensor in base.items() if table_of(key) and tensor.size}
    for _, file in checkpoint.row_files:
        for table in file.tables:
            tensors[table.key] = _described([table.rows, file.dim])
            for key in table.state_keys:
                columns = file.state_columns // len(table.state_keys)
                tensors[key] = _described([table.rows] if file.state_columns == 1 else [table.rows, columns])
    return tensors


def _described(size: list[int]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks=[])


def read_rows(reader: SafeReader, metadata: Metadata, key: str, first: int, count: int) -> torch.Tensor:
    """Return rows of a stored tensor."""
    described = metadata.state_dict_metadata[key]
    size = torch.Size([count, *described.size[1:]])
    rows = torch.empty(size, dtype=described.properties.dtype)
    chunk = ChunkStorageMetadata(torch.Size([first, *[0] * (len(size) - 1)]), size)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(LoadPlan(create_read_items_for_chunk_list(key, described, [chunk])), _Rows(rows))
    return rows


class _Rows(dcp.DefaultLoadPlanner):
    """Reads into one tensor."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self._rows = rows

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._rows


def read_into(state: dict[str, Any], path: Path, alone: bool) -> None:
    """Read the tensors with the keys of `state` into it. All ranks take part, unless this process reads `alone`."""
    try:
        dcp.load(state, storage_reader=SafeReader(path), no_dist=alone)
    except (RuntimeError, ValueError, OSError, dcp.CheckpointException) as error:
        fact = str(error).strip().splitlines()[-1]
        raise CheckpointError(
            f"{path}: could not be read ({fact}). Check its digests: recmill checkpoint verify."
        ) from error
