"""Plans without processes or devices. tests/distributed/test_sharding.py trains with them."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recmill.config.sections import TablesOptim
from recmill.errors import ConfigError, ResourceError
from recmill.nn.click_network import ClickNetwork, DenseLayers
from recmill.nn.interactions import DotInteraction
from recmill.nn.losses import Loss
from recmill.nn.sequences import ItemTransformer
from recmill.nn.transformer import TransformerShape
from recmill.tables.optimizers import OPTIMIZERS
from recmill.tables.placement import (
    Catalogue,
    Machines,
    Placed,
    Request,
    as_rows,
    bytes_beside_tables,
    make_plan,
    placements,
)
from recmill.tables.sharding import make_sharders
from recmill.tables.spec import Stores, TableSpec

META = torch.device("meta")
# Rows of MLPerf's DLRM (mlcommons/training, recommendation_v2): at most 40 million each.
MLPERF = [40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209]
MLPERF += [11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36]


def placed(
    rows: list[int], dim: int, machines: Machines, types: dict[str, str] | str = "auto", optimizer: str = "adagrad"
) -> dict[str, Placed]:
    tables = [TableSpec(f"t{i}", f"f{i}", count, dim, 0.1) for i, count in enumerate(rows)]
    named = {t.name: types if isinstance(types, str) else types.get(t.name, "auto") for t in tables}
    request = Request(tables, named, optimizer, 8192, {t.feature: 1 for t in tables})
    network = ClickNetwork(tables, DenseLayers(13, [512, dim], [64]), DotInteraction(len(tables) + 1, dim), META)
    plan = make_plan(network, make_sharders(TablesOptim(name=optimizer)), request, machines)  # type: ignore[arg-type]
    return {p.table: p for p in placements(plan, tables, optimizer)}


def test_mlperf_s_tables_are_planned_for_eight_gpus_of_40_gb_without_one() -> None:
    found = placed(MLPERF, 128, Machines(8, 8, "cuda", 40 * 10**9), {"t10": "row_wise", "t1": "data_parallel"})
    by_rank = [sum(p.bytes_by_rank.get(rank, 0) for p in found.values()) for rank in range(8)]
    # Rows and Adagrad's state, and twice the gradient of the one that every GPU holds.
    assert sum(by_rank) == 2 * 4 * 128 * (sum(MLPERF) - MLPERF[1]) + 8 * 4 * 4 * 128 * MLPERF[1]
    assert max(by_rank) < 36 * 10**9
    assert (found["t10"].type, list(found["t10"].bytes_by_rank)) == ("row_wise", list(range(8)))
    assert (found["t1"].type, list(found["t1"].bytes_by_rank)) == ("data_parallel", list(range(8)))
    # 41 GB with their state: no GPU could hold a complete one
    assert {found[f"t{i}"].type for i in (0, 9, 19, 20, 21)} <= {"row_wise", "column_wise"}
    assert {p.type for name, p in found.items() if p.rows < 10**6 and name != "t1"} == {"table_wise"}


def test_four_of_those_gpus_are_too_few() -> None:
    with pytest.raises(ResourceError, match="The tables do not fit"):
        placed(MLPERF, 128, Machines(4, 4, "cuda", 40 * 10**9))


@pytest.mark.parametrize(
    ("kind", "values_per_rank"),
    [("row_wise", 8000), ("column_wise", 8000), ("table_row_wise", 16000), ("grid", 8000), ("data_parallel", 32000)],
)
def test_narrow_tables_are_really_sharded(kind: str, values_per_rank: int) -> None:
    """2,000 x 16 over 4 processes on 2 machines; TorchRec by itself makes no shard of fewer than 128 columns."""
    (table,) = placed([2000], 16, Machines(4, 2, "cpu", 10**10), kind, "sgd").values()
    copies = 3 if kind == "data_parallel" else 1  # the gradient twice
    ranks = [0, 1] if kind == "table_row_wise" else [0, 1, 2, 3]
    assert table.bytes_by_rank == dict.fromkeys(ranks, 4 * values_per_rank * copies)


@pytest.mark.parametrize(
    ("kind", "kernel", "ranks"),
    [
        ("table_wise", "fused", 1),
        ("row_wise", "fused", 4),
        ("column_wise", "fused", 4),
        ("table_row_wise", "fused", 2),
        ("grid", "fused", 4),
        ("data_parallel", "dense", 4),
    ],
)
def test_every_sharding_type_is_planned_for_gpus_with_fused_kernels(kind: str, kernel: str, ranks: int) -> None:
    """2 machines of 2 GPUs, on a machine that has none."""
    table = TableSpec("t", "f", 2000, 16, 0.1)
    network = ClickNetwork([table], DenseLayers(3, [16], [4]), DotInteraction(2, 16), META)
    request = Request([table], {"t": kind}, "adam" if kind == "table_wise" else "sgd", 8, {"f": 1})
    sharders = make_sharders(TablesOptim(name="adam" if kind == "table_wise" else "sgd"))
    plan = make_plan(network, sharders, request, Machines(4, 2, "cuda", 10**9))
    found = plan.plan["tables"]["t"]
    assert found.compute_kernel == kernel
    if kind == "data_parallel":
        assert found.ranks == [0, 1, 2, 3]
        return
    places = [str(shard.placement) for shard in found.sharding_spec.shards]
    assert len(set(places)) == ranks
    # A GPU's number counts on its machine, its rank in all.
    assert set(places) <= {"rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:0", "rank:3/cuda:1"}


def test_the_memory_of_a_gpu_is_what_counts_there() -> None:
    """By hand: rows and state 128 MB; 8,192 x 2 x (3 x 8 + 4 x 16) = 1.44 MB of batches; twice 16,593 dense values.

    13 x 512 + 512, 512 x 16 + 16, 17 x 64 + 64, 64 + 1. Of 143.9 MB 129.51 can be used, of 144.1 MB 129.69.
    """
    with pytest.raises(ResourceError, match=r"needs 129\.6 MB for .* \(0\.1 MB of it for dense layers and NCCL\)"):
        placed([1_000_000], 16, Machines(1, 1, "cuda", 143_900_000))
    placed([1_000_000], 16, Machines(1, 1, "cuda", 144_100_000))


def test_a_shared_table_is_counted_once_and_the_batches_of_each_of_its_features() -> None:
    """As above, with a second feature of 3 ids: 8,192 x 2 x (3 x 8 x 4 + 4 x 16 x 2) = 3.67 MB of batches."""
    table = TableSpec("t", "f", 1_000_000, 16, 0.1, more_features=("g",))
    network = ClickNetwork([table], DenseLayers(13, [512, 16], [64]), DotInteraction(3, 16), META)
    request = Request([table], {"t": "auto"}, "adagrad", 8192, {"f": 1, "g": 3})
    sharders = make_sharders(TablesOptim(name="adagrad"))
    with pytest.raises(ResourceError, match=r"needs 131\.8 MB for .* \(0\.1 MB of it for dense layers and NCCL\)"):
        make_plan(network, sharders, request, Machines(1, 1, "cuda", 146_400_000))
    plan = make_plan(network, sharders, request, Machines(1, 1, "cuda", 146_600_000))
    (found,) = placements(plan, [table], "adagrad")
    assert found.bytes_by_rank == {0: 2 * 4 * 16 * 1_000_000}


DENSE = 16_593  # values of the layers above, for one table of width 16


@pytest.mark.parametrize(
    ("gpus", "per_machine", "nccl"),
    [(1, 1, 0), (8, 8, 7 * 67_108_864), (16, 8, 7 * 67_108_864 + 536_870_912), (80, 8, 7 * 67_108_864 + 536_870_912)],
)
def test_what_a_gpu_holds_beside_its_tables(gpus: int, per_machine: int, nccl: int) -> None:
    """A described device, and Adam: each dense value has a gradient and two of state; each head of 10M x 128 copies."""
    machines = Machines(gpus, per_machine, "cuda", 80 * 10**9)
    table = TableSpec("t", "f", 1_000_000, 16, 0.1)
    network = ClickNetwork([table], DenseLayers(13, [512, 16], [64]), DotInteraction(2, 16), META)
    request = Request([table], {"t": "auto"}, "adagrad", 8192, {"f": 1}, dense_state=2)
    assert bytes_beside_tables(network, request, machines) == 4 * 4 * DENSE + nccl
    assert bytes_beside_tables(network, request, replace(machines, device_type="cpu")) == 0
    head = 10_000_000 * 128
    # A linear head is a dense layer; 6 copies of it, 31 GB, with several GPUs.
    linear = replace(request, catalogue=Catalogue(10_000_000, 128, is_tied=False))
    expected = 4 * 4 * DENSE + nccl + 4 * head * (1 if gpus == 1 else 2)
    assert bytes_beside_tables(network, linear, machines) == expected
    tied = replace(request, catalogue=Catalogue(10_000_000, 128, is_tied=True))
    assert bytes_beside_tables(network, tied, machines) == 4 * 4 * DENSE + nccl + 4 * head * 4


@pytest.mark.parametrize(("gpus", "machines"), [(1, 1), (8, 1), (16, 2), (80, 10)])
def test_a_plan_fits_if_shards_batches_and_all_beside_them_fit(gpus: int, machines: int) -> None:
    """Eight tables, each sharded by rows over all GPUs."""
    shards = 8 * (2 * 4 * 16 * 4_000_000 / gpus + 8192 * gpus * 2 * (3 * 8 + 4 * 16))
    beside = 67_108_864 * (gpus // machines - 1) + (536_870_912 if machines > 1 else 0) + 2 * 4 * dense_values(8)
    needed = shards + beside
    enough, too_few = (Machines(gpus, gpus // machines, "cuda", int(needed * f / 0.9)) for f in (1.001, 0.999))
    placed([4_000_000] * 8, 16, enough, "row_wise")
    with pytest.raises(
        ResourceError, match=rf"of {gpus} needs {needed / 1e9:.1f} GB .*90% of the free memory of its GPU"
    ):
        placed([4_000_000] * 8, 16, too_few, "row_wise")


def dense_values(tables: int) -> int:
    pairs = tables * (tables + 1) // 2
    return 13 * 512 + 512 + 512 * 16 + 16 + (16 + pairs) * 64 + 64 + 64 + 1


@pytest.mark.parametrize(
    ("optimizer", "state_values"), [("sgd", 0), ("rowwise_adagrad", 1000), ("adagrad", 8000), ("adam", 16000)]
)
def test_the_optimizer_s_state_is_counted(optimizer: str, state_values: int) -> None:
    (table,) = placed([1000], 8, Machines(1, 1, "cuda", 10**10), "table_wise", optimizer).values()
    assert table.bytes_by_rank == {0: 4 * (8000 + state_values)}


def test_too_large_tables_are_refused_with_both_numbers() -> None:
    """By hand: 10^6 rows x 16 + Adagrad's state = 128 MB; batches: 8,192 x (2 x 8 + 2 x 4 x 16) = 1.2 MB."""
    with pytest.raises(ResourceError) as caught:
        placed([1_000_000], 16, Machines(1, 1, "cpu", 100 * 10**6))
    text = str(caught.value)
    assert "process 0 of 1 needs 129.2 MB" in text
    assert "can use 90.0 MB (90% of its share of the memory), 39.2 MB too little" in text
    placed([1_000_000], 16, Machines(1, 1, "cpu", 144 * 10**6))  # 129.6 MB can be used


def test_a_table_of_sequences_allows_fewer_sharding_types() -> None:
    table = TableSpec("item", "item", 202, 16, 0.05)
    network = ItemTransformer(table, 200, TransformerShape(10, 1, 2, 0.0), META, "linear", Loss())
    request = Request([table], {"item": "grid"}, "sgd", 8, {"item": 10})
    with pytest.raises(ConfigError, match="sharding 'grid' of table 'item': TorchRec cannot shard a table of"):
        make_plan(network, make_sharders(TablesOptim(name="sgd")), request, Machines(2, 2, "cpu", 10**10))


def test_the_plan_is_shown_as_a_table() -> None:
    tables = [Placed("t0", 2000, 8, "row_wise", {0: 64_000, 1: 64_000}), Placed("t1", 5, 8, "table_wise", {1: 20_000})]
    assert as_rows(tables, world_size=2) == [
        ["table", "rows", "dim", "sharding", "process", "MB per process"],
        ["t0", "2,000", "8", "row_wise", "0, 1", "0.06"],
        ["t1", "5", "8", "table_wise", "1", "0.02"],
        ["all", "2,005", "", "", "0, 1", "0.06 to 0.08"],
    ]
    _, *largest, total = as_rows(tables, world_size=2, largest=1)
    assert [row[0] for row in largest] == ["t0"]
    assert total == ["all 2", "2,005", "", "", "0, 1", "0.06 to 0.08"]
    alone = [Placed("t0", 2000, 8, "table_wise", {0: 64_000})]
    assert as_rows(alone, world_size=1) == [["table", "rows", "dim", "MB"], ["t0", "2,000", "8", "0.06"]]


def test_the_page_of_memory_has_the_numbers_of_the_planner() -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    for optimizer, row in re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\| ([\d,]+ \| [\d,]+) \|$", page, flags=re.M):
        per_row = [4 * (columns + OPTIMIZERS[optimizer].state_values(1, columns)) for columns in (128, 16)]
        assert row == " | ".join(f"{count:,}" for count in per_row), optimizer
    fits = re.findall(r"^\| `(\w+)` \| ([\d.]+) GB \| (.*) \|$", page, flags=re.M)
    assert [optimizer for optimizer, _, _ in fits] == ["sgd", "rowwise_adagrad", "adagrad"]
    for optimizer, total, cells in fits:
        for (count, gigabytes), cell in zip([(1, 128), (2, 64), (4, 32), (8, 32)], cells.split(" | "), strict=True):
            machines = Machines(count, 1, "cpu", gigabytes * 10**9)
            with nullcontext() if cell == "fits" else pytest.raises(ResourceError):
                found = placed(MLPERF, 128, machines, optimizer=optimizer)
                assert f"{sum(sum(p.bytes_by_rank.values()) for p in found.values()) / 1e9:.1f}" == total
    with pytest.raises(ResourceError) as refused:
        placed(MLPERF, 128, Machines(2, 2, "cpu", 32 * 10**9), optimizer="rowwise_adagrad")
    assert f"```\n{refused.value}\n```" in page


def test_tables_in_cached_host_mem_take_the_budget_of_a_gpu_and_the_state_of_their_rows() -> None:
    """100 M rows of 128: 51 GB. The caches of 8 GPUs with 2 GiB each hold a third of it."""
    table = TableSpec("t", "f", 10**8, 128, 0.1)
    stores = Stores({"t": "cached_host_mem"}, budget_bytes=2 << 30)
    request = Request([table], {"t": "row_wise"}, "rowwise_adagrad", 1024, {"f": 1}, stores=stores)
    network = ClickNetwork([table], DenseLayers(1, [128], [8]), DotInteraction(2, 128), META)
    sharders = make_sharders(TablesOptim(name="rowwise_adagrad"))
    plan = make_plan(network, sharders, request, Machines(8, 8, "cuda", 4 * 10**9))
    (sharding,) = (sharding for module in plan.plan.values() for sharding in module.values())
    assert sharding.compute_kernel == "fused_uvm_caching"
    assert sharding.cache_params.load_factor == pytest.approx(8 * (2 << 30) / (4 * 128 * 10**8))
    with pytest.raises(ResourceError, match="The tables do not fit"):  # 2.1 GB of cache and 0.4 GB of state
        make_plan(network, sharders, request, Machines(8, 8, "cuda", 2 * 10**9))
    on_cpu = make_plan(network, sharders, request, Machines(8, 8, "cpu", 8 * 10**9))
    assert {sharding.compute_kernel for module in on_cpu.plan.values() for sharding in module.values()} == {"fused"}
