"""Large tensors are saved in chunks, and a shard of one is read without the rest. Torch's own reader agrees."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from recmill.checkpoints import chunks, loading, safe_reader

from ..checkpoints import newest_in, save_network

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # alone, as meant

_LOAD_HALF = """
import sys
import torch, torch.distributed as dist
from pathlib import Path
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.testing._internal.distributed.fake_pg import FakeStore
from recmill.checkpoints.safe_reader import read_into

def peak():
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024

rows, dim, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
own = torch.ones(rows // 2, dim)
shards = [ShardMetadata([rows // 2 * rank, 0], [rows // 2, dim], f"rank:{rank}/cpu") for rank in (0, 1)]
metadata = ShardedTensorMetadata(shards, torch.Size([rows, dim]), TensorProperties(torch.float32))
table = ShardedTensor._init_from_local_shards_and_global_metadata([Shard(own, shards[0])], metadata)
before = peak()
read_into({"table": table}, path, alone=True)
print(peak() - before, own.double().sum().item())
"""


def test_half_of_a_table_is_loaded_with_little_more_memory_than_itself(tmp_path: Path) -> None:
    """The table is stored as one tensor, as in earlier checkpoints."""
    rows, dim = 1 << 20, 64
    table = torch.arange(rows * dim, dtype=torch.float32).view(rows, dim)
    dcp.save({"table": table}, checkpoint_id=tmp_path, no_dist=True)
    command = [sys.executable, "-W", "ignore", "-c", _LOAD_HALF, str(rows), str(dim), str(tmp_path)]
    more, total = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert float(total) == table[: rows // 2].double().sum().item()
    assert int(more) < table.nbytes // 4


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1001, 3))
        self.column_major = nn.Parameter(torch.randn(40, 700).t())
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 3))


@pytest.mark.parametrize("piece_bytes", [16, 1000, 1 << 24])
def test_chunks_are_joined_by_torch_and_by_us_to_the_saved_bits(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(safe_reader, "_PIECE_BYTES", piece_bytes)
    saved, loaded = Sizes(), Sizes()
    save_network(tmp_path, saved, step=1)
    found = newest_in(tmp_path)
    described = safe_reader.SafeReader(found.path).read_metadata().state_dict_metadata
    assert len(described["model.table"].chunks) == -(-1001 // (1000 // 12))
    loading.load(found, loaded)
    by_torch = {f"model.{key}": torch.zeros_like(value) for key, value in saved.state_dict().items()}
    dcp.load(by_torch, checkpoint_id=found.path, no_dist=True)
    for key, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
        assert torch.equal(by_torch[f"model.{key}"], value)
