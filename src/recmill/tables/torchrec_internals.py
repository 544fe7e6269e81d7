"""The only module that uses private or unstable names of TorchRec, FBGEMM and torch.

At import it compares the installed versions with `pins` and looks for every name in PRIVATE_NAMES, so that an upgrade
fails here, by name, and not in the middle of a run. The rest of Recmill calls the functions below.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import fbgemm_gpu
import fbgemm_gpu.split_table_batched_embeddings_ops_training as tables_of_training
import numpy as np
import torch
import torch.nn.functional as F
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchrec.distributed import batched_embedding_kernel, embedding_sharding
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding
from torchrec.distributed.types import LazyAwaitable, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recmill.errors import UserError
from recmill.tables import pins


def _unusable(fact: object) -> UserError:
    needed = f"torch {pins.TORCH}, torchrec {pins.TORCHREC} and fbgemm-gpu {pins.FBGEMM}"
    return UserError(f"The installed libraries do not work: {fact}. Recmill needs {needed}. Run: recmill doctor.")


try:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
    from torch.distributed.remote_device import _remote_device
    from torch.fx._symbolic_trace import PHWithMeta
    from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbedding, BaseBatchedEmbeddingBag
    from torchrec.distributed.embedding_sharding import EmbDimBucketer, EmbDimBucketerPolicy
except ImportError as error:
    raise _unusable(error) from error

# The undocumented names that this module uses, by class.
PRIVATE_NAMES: dict[type, tuple[str, ...]] = {
    ShardedEmbeddingBagCollection: ("_lookups", "_embedding_names", "_embedding_dims", "_embedding_shardings"),
    ShardedEmbeddingCollection: ("_lookups", "_sharding_type_to_sharding"),
    BaseRwEmbeddingSharding: ("_get_feature_hash_sizes",),
    BaseBatchedEmbeddingBag: ("_emb_module", "_config"),
    BaseBatchedEmbedding: ("_emb_module", "_config"),
    SplitTableBatchedEmbeddingBagsCodegen: (
        *("weights_host", "weights_offsets", "momentum1_host", "momentum1_offsets", "momentum2_host"),
        *("rows_per_table", "embedding_specs", "feature_table_map", "pooling_mode"),
        *("optimizer", "optimizer_args", "get_learning_rate", "current_device", "iter", "iter_cpu"),
    ),
    DenseTableBatchedEmbeddingBagsCodegen: ("weights", "hash_size_cumsum", "max_D"),
    LazyAwaitable: ("callbacks",),
    FileSystemReader: ("_slice_file",),
    ShardedTensor: ("_init_from_local_shards_and_global_metadata", "_process_group"),
}


def check_libraries(private_names: dict[type, tuple[str, ...]] = PRIVATE_NAMES) -> None:
    """Raise UserError if an installed version is not the pinned one, or if a private name is gone."""
    for module, pinned in ((torch, pins.TORCH), (torchrec, pins.TORCHREC), (fbgemm_gpu, pins.FBGEMM)):
        if module.__version__.split("+")[0] != pinned:
            raise _unusable(f"{module.__name__} {module.__version__} is installed")
    for owner, names in private_names.items():
        if missing := set(names) - _names_in(owner):
            library = owner.__module__.split(".")[0]
            raise _unusable(f"{owner.__name__} of {library} has no attribute '{min(missing)}'")


def _names_in(owner: type) -> set[str]:
    """Return the attributes of a class and all names that its methods use: those set in `__init__` are only there."""
    names: set[str] = set()
    for parent in owner.__mro__:
        names |= vars(parent).keys()
        for value in vars(parent).values():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            names |= set(code.co_names) if code else set()
    return names


check_libraries()


class WithoutMetaValues(TorchFunctionMode):
    """Skips the first values of tables on device 'meta': without effect, they import torch's compiler and sympy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.init.normal_ and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


# Keys of tables in state dictionaries and checkpoints: PATH.embedding_bags.TABLE.weight for sums of rows,
# PATH.embeddings.TABLE.weight for sequences; optimizer states continue with .TABLE.momentum1 and the like.
_TABLE_KEY = re.compile(r"(?:^|\.)embedding(?:_bag)?s\.(.+?)\.weight(?:\.|$)")


def table_of(key: str) -> str | None:
    """Return the table that a tensor belongs to, by its key in a state dictionary or checkpoint."""
    found = _TABLE_KEY.search(key)
    return found[1] if found else None


def tables_of(network: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the config and the module of each table of a network that is not sharded yet."""
    for module in network.modules():
        if isinstance(module, EmbeddingBagCollection):
            yield from ((config, module.embedding_bags[config.name]) for config in module.embedding_bag_configs())
        elif isinstance(module, EmbeddingCollection):
            yield from ((config, module.embeddings[config.name]) for config in module.embedding_configs())


def replicated_tables(plan: ShardingPlan) -> set[str]:
    """Return the names of the tables that every rank holds completely."""
    placed = [item for module_plan in plan.plan.values() for item in module_plan.items()]
    return {table for table, sharding in placed if sharding.sharding_type == "data_parallel"}


def place_on(plan: ShardingPlan, devices: list[torch.device]) -> None:
    """Place the shards of each rank on its own device: TorchRec's planner expects process N of a machine on GPU N."""
    for parameter in (parameter for module_plan in plan.plan.values() for parameter in module_plan.values()):
        for shard in parameter.sharding_spec.shards if parameter.sharding_spec else []:
            rank = shard.placement.rank()
            shard.placement = _remote_device(f"rank:{rank}/{devices[rank]}")


ShardKey = tuple[str, int]  # a table and the first row of one of its shards


class LocalShard(NamedTuple):
    """The part of a tensor that this process holds, and its offsets in the complete tensor."""

    row: int
    column: int
    values: Tensor


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, ShardedTensor)


def local_shards(tensor: Tensor) -> Iterator[LocalShard]:
    """Yield this process's shards of a tensor; an ordinary tensor is one shard."""
    if not isinstance(tensor, ShardedTensor):
        yield LocalShard(0, 0, tensor)
        return
    for shard in tensor.local_shards():
        row, column = [*shard.metadata.shard_offsets, 0][:2]
        yield LocalShard(row, column, shard.tensor)


def table_shards(model: nn.Module) -> Iterator[tuple[str, LocalShard]]:
    """Yield this process's shards of all tables, each with the name of its table."""
    for key, value in model.state_dict().items():
        if table := table_of(key):
            for shard in local_shards(value):
                yield table, shard


def copy_to_cpu(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor sharded like `tensor`, in CPU memory; `copy` copies each of this process's shards there."""
    if not isinstance(tensor, ShardedTensor):
        return copy(tensor)
    shards = [Shard(copy(shard.tensor), _on_cpu(shard.metadata)) for shard in tensor.local_shards()]
    metadata = replace(
        tensor.metadata(), shards_metadata=[_on_cpu(shard) for shard in tensor.metadata().shards_metadata]
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=metadata, process_group=tensor._process_group
    )


def _on_cpu(shard: ShardMetadata) -> ShardMetadata:
    """Describe the same shard, on the same rank; a ShardedTensor refuses a shard that is on another device."""
    assert shard.placement is not None
    return ShardMetadata(shard.shard_offsets, shard.shard_sizes, f"rank:{shard.placement.rank()}/cpu")


def flat_state(state: dict[str, Any]) -> dict[str, Tensor]:
    """Flatten nested state dictionaries to 'a.b.c' -> tensor, with the keys that checkpoints use."""
    return flatten_state_dict(state)[0]


# The classes that `.metadata` of a checkpoint may hold, by module: they describe tensors and where they are stored.
METADATA_CLASSES = {
    "pathlib": {"PosixPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


def stored_tensor(file: IO[bytes], offset: int, length: int) -> tuple[Tensor, int]:
    """Return a tensor that torch.save wrote at `offset`, without its values, and the offset of these in the file."""
    reader = FileSystemReader("")
    stored = reader._slice_file(file, _StorageInfo("", offset, length))
    # On "meta", no values are read. A FakeTensorMode would do the same, and import torch's compiler.
    described = torch.load(stored, map_location="meta", weights_only=True)
    storage = described.untyped_storage()
    return described, offset + storage._checkpoint_offset + described.storage_offset() * described.element_size()


def pipeline_inputs(*fields: str) -> tuple[Any, ...]:
    """Name the batch's fields for TorchRec's pipeline, one for each argument of the network's forward()."""
    return tuple(PHWithMeta(field) for field in fields)


def when_ready(output: Any, function: Callable[[Any], Any]) -> None:
    """Replace the output of a sharded module with `function(output)` once the ranks have exchanged it."""
    output.callbacks.append(function)


class TableGroup:
    """A group of tables that TorchRec looks up with one FBGEMM module."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @property
    def module(self) -> Any:
        return self._group._emb_module

    def replace_module(self, module: nn.Module) -> None:
        """Make TorchRec look rows up with `module`; the fused optimizer still refers to FBGEMM's module."""
        self._group._emb_module = module

    @property
    def shards(self) -> list[ShardKey]:
        """The shards in this group, in the order of FBGEMM's tables."""
        return [(table.name, table.local_metadata.shard_offsets[0]) for table in self._group._config.embedding_tables]


@contextmanager
def grouping_by_width() -> Iterator[None]:
    """Within the block, TorchRec makes one group for each width of tables: our kernels and caches have one width."""
    embedding_sharding.EmbDimBucketer = lambda tables, _: EmbDimBucketer(tables, EmbDimBucketerPolicy.ALL_BUCKETS)
    try:
        yield
    finally:
        embedding_sharding.EmbDimBucketer = EmbDimBucketer


@contextmanager
def any_width_on_cpu() -> Iterator[None]:
    """Within the block, TorchRec and FBGEMM accept tables of any width. They check what only CUDA kernels need."""
    check, construct = (
        batched_embedding_kernel._assert_local_cols_divisible_by_4,
        tables_of_training.construct_split_state,
    )
    batched_embedding_kernel._assert_local_cols_divisible_by_4 = lambda _: None
    tables_of_training.construct_split_state = _host_state
    try:
        yield
    finally:
        batched_embedding_kernel._assert_local_cols_divisible_by_4 = check
        tables_of_training.construct_split_state = construct


def _host_state(embedding_specs: list[Any], rowwise: bool, *_: Any, **__: Any) -> Any:
    """Return FBGEMM's layout of the weights or a state of tables in host memory, one after the other."""
    sizes = [rows if rowwise else rows * dim for rows, dim, *_ in embedding_specs]
    assert all(place == tables_of_training.EmbeddingLocation.HOST for _, _, place, _ in embedding_specs)
    return tables_of_training.SplitState(
        dev_size=0,
        host_size=sum(sizes),
        uvm_size=0,
        placements=[tables_of_training.EmbeddingLocation.HOST] * len(sizes),
        offsets=[sum(sizes[:number]) for number in range(len(sizes))],
    )


@contextmanager
def adam_on_cpu() -> Iterator[None]:
    """Within the block, FBGEMM's modules accept Adam on CPU, too. They allocate its state, but cannot update rows."""
    construct = SplitTableBatchedEmbeddingBagsCodegen.__init__
    # FBGEMM accepts EXACT_ADAGRAD on CPU, so Adam takes its name.
    names = EmbOptimType.__members__ | {"EXACT_ADAGRAD": EmbOptimType.ADAM}

    def construct_on_cpu(*arguments: Any, **options: Any) -> None:
        tables_of_training.OptimType = SimpleNamespace(**names)
        try:
            construct(*arguments, **options)
        finally:
            tables_of_training.OptimType = EmbOptimType

    SplitTableBatchedEmbeddingBagsCodegen.__init__ = construct_on_cpu
    try:
        yield
    finally:
        SplitTableBatchedEmbeddingBagsCodegen.__init__ = construct


def sharded_collections(model: nn.Module) -> list[Any]:
    kinds = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
    return [module for module in model.modules() if isinstance(module, kinds)]


def table_groups(collection: Any) -> list[TableGroup]:
    """Return the groups of a sharded collection; they are not among its submodules."""
    parts = [part for lookup in collection._lookups for part in lookup.modules()]
    return [TableGroup(part) for part in parts if isinstance(part, (BaseBatchedEmbeddingBag, BaseBatchedEmbedding))]


def cut_ids_of(rows: dict[str, int], model: nn.Module) -> None:
    """Make TorchRec send ids to ranks as if the tables of these features had `rows`. Call it before any lookup."""
    for collection in sharded_collections(model):
        are_bags = isinstance(collection, ShardedEmbeddingBagCollection)
        shardings = collection._embedding_shardings if are_bags else collection._sharding_type_to_sharding.values()
        for sharding in shardings:
            if isinstance(sharding, BaseRwEmbeddingSharding):
                sizes = zip(sharding.feature_names(), sharding._get_feature_hash_sizes(), strict=True)
                true_sizes = [rows.get(feature, size) for feature, size in sizes]
                sharding._get_feature_hash_sizes = lambda sizes=true_sizes: sizes


def skip_exchange(bags: Any, lookup: nn.Module) -> None:
    """Bypass TorchRec's exchange between ranks, for a collection whose tables are all in `lookup`.

    The exchange costs a millisecond per step, even with one rank.
    """
    with_exchange = bags.forward

    def forward(ids: KeyedJaggedTensor) -> Any:
        if bags._embedding_names != ids.keys():
            return with_exchange(ids)
        return KeyedTensor(bags._embedding_names, bags._embedding_dims, lookup(ids.values(), ids.offsets()))

    bags.forward = forward


def is_fused(module: object) -> bool:
    """Return whether FBGEMM updates the rows of these tables in backward."""
    return isinstance(module, SplitTableBatchedEmbeddingBagsCodegen)


def set_step_count(module: SplitTableBatchedEmbeddingBagsCodegen, steps: int) -> None:
    """Set how many steps FBGEMM's optimizer has taken; every forward pass adds one, in evaluation as well."""
    module.iter_cpu.fill_(steps)
    module.iter.fill_(steps)  # FBGEMM reads this one while the other is 0


class RowMemory(NamedTuple):
    """Where the rows of a group of tables of one width are; the first eight as the kernel `update_bags` takes them."""

    weights: Tensor  # all rows, one table after the other
    starts: Tensor  # of each feature's table
    state: Tensor | None  # of the optimizer; SGD has none
    state2: Tensor | None  # its second one
    state_starts: Tensor | None
    state_stride: int  # values from the state of one row to that of the next; 0: there is none
    rows: Tensor  # of each feature's table
    tables: Tensor  # of each feature
    dim: int
    module: SplitTableBatchedEmbeddingBagsCodegen

    @property
    def lr(self) -> float:
        return float(self.module.get_learning_rate())

    @property
    def step(self) -> int:
        """The number of this step, counted from 1; only for optimizers that depend on it."""
        return int(self.module.iter_cpu) + 1

    def rows_of(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Number the looked-up rows from the first table's first one."""
        is_outside = (ids < 0) | (ids >= shifted_by_feature(torch.zeros_like(ids), offsets, self.rows))
        if is_outside.any():  # ids are checked when they are loaded: this is a defect, and must not train a wrong row
            bad = int(is_outside.nonzero()[0])
            raise IndexError(f"id {int(ids[bad])} at position {bad} of {len(ids)} is outside its table")
        return shifted_by_feature(ids, offsets, self.starts // self.dim)

    def as_one_table(self) -> "RowMemory":
        zero = torch.zeros(1, dtype=torch.int64)
        rows = torch.tensor([self.weights.numel() // self.dim])
        return self._replace(starts=zero, state_starts=zero, rows=rows, tables=zero)


class FusedTables:
    """The rows and the optimizer state that FBGEMM keeps of a group of tables on CPU."""

    def __init__(self, module: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        self.module = module
        self.dim: int = module.embedding_specs[0][1]
        self.rows: Tensor = module.rows_per_table.long()  # FBGEMM has these and the offsets by feature
        self._tables: Tensor = torch.tensor(module.feature_table_map)  # of each feature

    @property
    def have_one_width(self) -> bool:
        return len({dim for _, dim, *_ in self.module.embedding_specs}) == 1

    @property
    def are_summed(self) -> bool:
        """Whether lookups sum float32 rows of one width, and the features of a table follow one another."""
        module = self.module
        are_in_order = module.feature_table_map == sorted(module.feature_table_map)
        is_float32_sum = module.pooling_mode == PoolingMode.SUM and module.weights_host.dtype == torch.float32
        return self.have_one_width and are_in_order and is_float32_sum

    @property
    def memory(self) -> RowMemory:
        module = self.module
        has_state = module.optimizer != EmbOptimType.EXACT_SGD
        stride = 1 if module.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD else self.dim
        return RowMemory(
            module.weights_host,
            module.weights_offsets,
            module.momentum1_host if has_state else None,
            module.momentum2_host if module.optimizer == EmbOptimType.ADAM else None,
            module.momentum1_offsets if has_state else None,
            stride if has_state else 0,
            self.rows,
            self._tables,
            self.dim,
            module,
        )

    def slots(self, count: int, state_columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Return views of the first `count` rows and their state, whatever table they belong to.

        Two states are side by side in an array of their own, and those of FBGEMM are freed.
        """
        weights = self.module.weights_host.detach()[: count * self.dim].view(count, self.dim).numpy()
        if self.module.optimizer == EmbOptimType.ADAM:
            for state in (self.module.momentum1_host, self.module.momentum2_host):
                state.untyped_storage().resize_(0)
            return weights, np.zeros((count, state_columns), np.float32)
        state = self.module.momentum1_host.detach()[: count * state_columns] if state_columns else weights[:0]
        return weights, np.asarray(state).reshape(count, state_columns)


def new_row_marks(module: SplitTableBatchedEmbeddingBagsCodegen) -> tuple[list[int], Tensor, Tensor]:
    """Return the number of rows of each table, a mark for every row, and the first mark of each feature's table."""
    rows_per_table = [rows for rows, *_ in module.embedding_specs]
    marks = torch.zeros(sum(rows_per_table), dtype=torch.bool, device=module.current_device)
    table_offsets = torch.tensor([0, *rows_per_table], device=marks.device).cumsum(0)
    return rows_per_table, marks, table_offsets[module.feature_table_map]


def shifted_by_feature(ids: Tensor, bag_offsets: Tensor, shifts: Tensor) -> Tensor:
    """Add to each id the shift of its feature. Bags are ordered by feature, and each feature has the same number."""
    batch_size = (len(bag_offsets) - 1) // len(shifts)
    return ids + shifts.repeat_interleave(bag_offsets[::batch_size].diff(), output_size=len(ids))


def replicated_sequence_rows(module: DenseTableBatchedEmbeddingBagsCodegen, indices: Tensor, offsets: Tensor) -> Tensor:
    """Return each looked-up row of data_parallel tables, which FBGEMM's dense CPU kernel would sum.

    The tables follow one another in memory and have the same width.
    """
    rows = shifted_by_feature(indices, offsets, module.hash_size_cumsum[:-1])
    return F.embedding(rows, module.weights.view(-1, module.max_D))
