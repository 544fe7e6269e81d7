"""`recmill plan`: memory, changes that make tables fit, and forecasts, without a GPU, a dataset or processes."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from recmill.commands import calibrate
from recmill.commands import plan as command
from recmill.commands.plan import plan
from recmill.config import load_config
from recmill.errors import ConfigError, ResourceError
from recmill.observe.printed_plan import print_plan
from recmill.observe.verdict import Hints
from recmill.planning.calibrate import REFERENCES, device_from, fitted_costs
from recmill.planning.devices import DEVICES, Site, read_device
from recmill.planning.forecast import run_time, step_time
from recmill.planning.published import PUBLISHED, described, read_sizes
from recmill.planning.work import Work, step_work
from tests.conftest import Config, RunCli

BIG_TABLES = ("C1", "C10", "C20", "C22")  # of Criteo 1TB: with 80 million rows or all, larger than a GPU of 40 GB


def small(rows: str = "1000,2000", **keys: Any) -> dict[str, Any]:
    """Two tables of 8 columns, without a dataset."""
    model = {"name": "dlrm", "embedding_dim": 8, "bottom_mlp": [16, 8], "top_mlp": [16], "pad_to_multiple_of": 1}
    config: dict[str, Any] = {"data": {"path": "nowhere"}, "model": model, "train": {"global_batch_size": 64}}
    return config | keys


def test_bytes_of_tables_are_those_worked_out_by_hand() -> None:
    """2,000 x 8 values on one process; 64 samples: 2 x 8 bytes an id, and a row of 8 x 4 bytes with its gradient."""
    config = small(optim={"tables": {"name": "adagrad"}})
    report = plan(config, rows="1000,2000")
    table = next(table for table in report.tables if table.table == "table_C2")
    held = table.bytes
    assert (table.rows, table.dim, table.ranks) == (2000, 8, "0")
    assert (held.rows, held.state, held.gradients, held.cache) == (2000 * 8 * 4, 2000 * 8 * 4, 0, 0)
    assert (held.ids, held.looked_up) == (64 * 2 * 8, 64 * 2 * 8 * 4)
    (rank,) = report.ranks
    # 13 x 16 + 16, 16 x 8 + 8, 11 x 16 + 16, 16 + 1 values, each with a gradient and Adam's two.
    values = 13 * 16 + 16 + 16 * 8 + 8 + (8 + 3) * 16 + 16 + 16 + 1
    assert (rank.dense, rank.buffers) == (4 * 4 * values, 0)
    assert rank.total == sum(table.bytes.total for table in report.tables)
    assert rank.checkpoint_copy == 2 * 3000 * 8 * 4 + 3 * 4 * values
    assert rank.checkpoint_peak == rank.total + rank.dense + rank.layer_values + rank.checkpoint_copy
    assert report.checkpoint_bytes == rank.checkpoint_copy
    assert report.disk_bytes == 3 * report.checkpoint_bytes  # two are kept while the next is written


def test_a_checkpoint_without_a_copy_adds_nothing_to_the_memory_of_a_gpu() -> None:
    options: dict[str, Any] = {"rows": "1000000,2000000", "device": "a100-40gb"}
    (copied,) = plan(small(), **options).ranks
    (waits,) = plan(small(checkpoint={"background": False}), **options).ranks
    assert waits.checkpoint_peak == copied.checkpoint_peak == copied.total + copied.layer_values
    assert (waits.checkpoint_copy, waits.checkpoint_waits) == (0, True)


def test_the_bytes_of_each_rank_add_up_to_those_that_the_planner_counts() -> None:
    loaded = load_config("criteo_1tb/dlrm_mlperf", ["sharding.tables.C2=data_parallel", "optim.tables.name=adagrad"])
    dataset = described(PUBLISHED["criteo_1tb_40m"], "clicks", "x")
    case = command.plan_case(loaded, dataset, Site(2, 8, DEVICES["a100-40gb"]))
    from recmill.planning.memory import explain

    _, ranks = explain(case, step_work(case), in_background=True)
    assert case.planned.fits
    assert sorted(rank.total for rank in ranks) == sorted({*case.planned.needed.values()})


@pytest.mark.parametrize(
    ("keys", "options", "expected"),
    [
        ({"sharding": {"mode": "ddp"}}, {"procs": 4, "memory_gb": 36.0}, ["sharding.mode=auto"]),
        ({"sharding": {"default": "table_wise"}}, {"procs": 2, "memory_gb": 5.0}, ["sharding.default=auto"]),
        ({}, {"memory_gb": 2.0}, ["tables.store=cached_ssd", "tables.cache_memory_budget_mb=858"]),
        ({}, {"memory_gb": 2.0, "device": "a100-40gb"}, ["tables.store=cached_host_mem"]),
        ({"optim": {"tables": {"name": "adagrad"}}}, {"memory_gb": 4.5}, ["optim.tables.name=rowwise_adagrad"]),
        ({"train": {"global_batch_size": 2**22}}, {"memory_gb": 4.4}, ["train.global_batch_size="]),
    ],
    ids=["replicas", "one table per process", "files", "host memory", "state", "batch"],
)
def test_what_does_not_fit_fits_with_each_of_the_changes_that_are_shown(
    keys: dict[str, Any], options: dict[str, Any], expected: list[str]
) -> None:
    """Two tables of 100 million rows together: 3.2 GB, and 0.4 GB of state with row-wise Adagrad."""
    rows = "20000000,80000000"
    config = small(**keys)
    before = plan(config, rows=rows, **options)
    assert not before.fits
    assert any(all(any(o.startswith(e) for o in change.overrides) for e in expected) for change in before.changes)
    for change in before.changes:
        flags = str(change).split()
        overrides = [value for flag, value in zip(flags[::2], flags[1::2], strict=True) if flag == "--set"]
        nodes = [int(value) for flag, value in zip(flags[::2], flags[1::2], strict=True) if flag == "--nodes"]
        after = plan(config, rows=rows, **(options | {"overrides": overrides, "nodes": nodes[0] if nodes else 1}))
        assert after.fits, change
        assert min(rank.margin for rank in after.ranks) == change.margin >= 0


def test_more_machines_are_as_few_as_suffice() -> None:
    options: dict[str, Any] = {"rows": "20000000,80000000", "memory_gb": 0.8}
    report = plan(small(sharding={"default": "row_wise"}), **options)
    (nodes,) = [change.nodes for change in report.changes if change.nodes]
    assert nodes == 6  # 3.2 GB of rows, 0.4 GB of state and a few batches, of which each machine takes 0.72 GB
    assert not plan(small(sharding={"default": "row_wise"}), nodes=nodes - 1, **options).fits


def test_machines_are_proposed_only_if_their_caches_are_large_enough() -> None:
    """C1: 2.9 GB, for machines of 2 GB. C2: a cache of 3 MB holds half a batch of 32,768 rows, but not all."""
    tables = {"stores": {"C2": "cached_ssd"}, "cache_memory_budget_mb": 3}
    config = small(sharding={"default": "row_wise"}, tables=tables, train={"global_batch_size": 32_768})
    rows = "80000000,100000"
    device = read_device("cpu").model_copy(update={"memory_gb": 2.0})
    with pytest.raises(ResourceError, match=r"It fits with --nodes \d+\.") as error:
        command.check_fits(load_config(config), described(read_sizes(rows), "clicks", "x"), Site(1, 1, device))
    nodes = int(str(error.value).rpartition(" ")[2].rstrip("."))
    assert plan(config, rows=rows, nodes=nodes, memory_gb=2.0).fits
    with pytest.raises(ConfigError, match="cache_memory_budget_mb: 3 MB for 50,000 rows"):
        plan(config, rows=rows, nodes=2, memory_gb=2.0)


def test_scaling_includes_full_machines_of_any_number_of_processes() -> None:
    scaling = plan(small(), rows="1000,2000", procs=6, scaling=True).scaling
    assert [(scale.ranks, scale.nodes) for scale in scaling] == [
        (1, 1),
        (2, 1),
        (4, 1),
        (6, 1),
        (12, 2),
        (24, 4),
        (48, 8),
    ]


def test_more_users_are_planned_with_histories_as_long_as_before() -> None:
    published, more = (plan("ml_1m/bert4rec", rows="ml-1m", samples=users) for users in (None, 100_000))
    assert more.step.products == pytest.approx(published.step.products, rel=1e-3)
    assert more.run.steps > published.run.steps


@pytest.mark.parametrize(
    ("config", "gib", "fits_on_8"),
    [
        ("dlrm_mlperf", 97.36, True),  # also OneFlow's
        ("dlrm_mlperf_x2", 174.03, True),
        ("dlrm_full_size", 420.94, False),  # 56 GB for each of 8 GPUs
        ("dcnv2_mlperf_v2", 2 * 97.36, True),  # with Adagrad's state
    ],
)
@pytest.mark.parametrize("nodes", [1, 2, 10])
def test_published_configs_are_planned_for_8_16_and_80_gpus(
    config: str, gib: float, fits_on_8: bool, nodes: int
) -> None:
    """The sizes are those of TorchRec's README."""
    report = plan(f"criteo_1tb/{config}", nodes=nodes, procs=8, device="a100-40gb")
    held = sum((table.bytes.rows + table.bytes.state) * _num_ranks(table.ranks) for table in report.tables)
    assert report.fits == (fits_on_8 or nodes > 1)
    assert held / 2**30 == pytest.approx(gib, rel=2e-3)


def _num_ranks(ranks: str) -> int:
    parts = [part.split("-") for part in ranks.split(", ")]
    return sum(int(part[-1]) - int(part[0]) + 1 for part in parts)


def test_the_forecast_has_the_order_and_rough_size_of_published_speeds_on_gpus() -> None:
    """TorchRec's README, in million records per second. Tables larger than a GPU had to be row-wise there."""
    published = {"dlrm_mlperf": (1, 5.50), "dlrm_mlperf_x2": (2, 2.03), "dlrm_full_size": (10, 0.46)}
    row_wise = [f"sharding.tables.{name}=row_wise" for name in BIG_TABLES]
    speeds = {}
    for name, (nodes, _) in published.items():
        overrides = ["train.global_batch_size=65536"] if nodes == 1 else row_wise
        report = plan(f"criteo_1tb/{name}", nodes=nodes, procs=8, device="a100-40gb", overrides=overrides)
        speeds[name] = report.samples_per_s / 1e6
    assert speeds["dlrm_mlperf"] > speeds["dlrm_mlperf_x2"] > speeds["dlrm_full_size"]
    for name, (_, speed) in published.items():
        assert 1 / 2 < speeds[name] / speed < 2


def test_sequence_models_are_planned_too() -> None:
    report = plan("ml_1m/bert4rec", procs=2)
    (table,) = {table.table for table in report.tables}
    assert (table, report.fits) == ("item", True)
    assert report.step.products > report.step.lookups


def test_work_of_a_step_is_what_is_worked_out_by_hand() -> None:
    """Layers 13 x 16, 16 x 8, 11 x 16, 16 x 1, each multiplied three times; 3 x 3 pairs of 8 columns."""
    config = load_config(small(sharding={"default": "row_wise"}))
    dataset = described(read_sizes("1000,2000"), "clicks", "x")
    alone = step_work(command.plan_case(config, dataset, Site(1, 1, read_device("cpu"))))
    weights = 13 * 16 + 16 * 8 + 11 * 16 + 16
    assert alone.flops == 64 * (6 * weights + 3 * 3 * 3 * 8)
    assert (alone.lookups, alone.row_values) == (2 * 64, 2 * 64 * 8)
    assert (alone.link_bytes, alone.network_bytes, alone.collectives) == (0, 0, 0)
    two = step_work(command.plan_case(config, dataset, Site(1, 2, read_device("cpu"))))
    assert (two.flops, two.lookups) == (alone.flops / 2, alone.lookups / 2)
    # Ids go to the owner of the row; a sum of 8 columns goes to each rank from both, and gradients return.
    sums = 2 * 2 * (2 * 32 * 8 * 4)
    values = weights + 16 + 8 + 16 + 1
    assert two.link_bytes == 2 * 32 * 8 + sums + 4 * values
    half = load_config(small(sharding={"default": "row_wise", "forward_precision": "fp16"}))
    assert step_work(command.plan_case(half, dataset, Site(1, 2, read_device("cpu")))).link_bytes == (
        two.link_bytes - sums / 4
    )
    on_two_machines = step_work(command.plan_case(config, dataset, Site(2, 1, read_device("cpu"))))
    assert (on_two_machines.link_bytes, on_two_machines.network_bytes) == (0, two.link_bytes)


def test_a_step_takes_the_time_that_the_facts_say() -> None:
    device = replace_facts(gemm_gflops=1.0, memory_gb_per_s=12.0, row_gb_per_s=16.0, row_ns=0.0, call_us=0.0)
    machines = command.plan_case(
        load_config(small()), described(read_sizes("10,20"), "clicks", "x"), Site(1, 1, device)
    ).machines
    work = Work(flops=2e9, values=1e9, calls=3, lookups=5.0, row_values=2e9)
    train = load_config(small()).settings.train
    step = step_time(work, device, machines, train)
    assert (step.products, step.values, step.lookups, step.exchange) == pytest.approx((2.0, 1.0, 2.0, 0.0))
    two = replace(machines, world_size=2, local_size=2)
    shared = step_time(replace(work, link_bytes=1e9, collectives=1), device, two, train)
    assert shared.products == pytest.approx(2.0 * 2 / 0.5)  # half of the cores, which are half as fast together
    assert shared.exchange == pytest.approx(2 * 1e9 / 4e9 + 1e-3)


def test_a_gpu_waits_for_the_host_only_if_it_has_less_to_do() -> None:
    """Products of 2 and of 20 ms, and 7.2 ms of the host."""
    config = load_config(small())
    device = DEVICES["a100-40gb"].model_copy(update={"gemm_gflops": 1000.0})
    machines = command.plan_case(config, described(read_sizes("10,20"), "clicks", "x"), Site(1, 1, device)).machines
    short, long = (
        step_time(
            Work(flops=flops, values=0.0, calls=3, lookups=0.0, row_values=0.0), device, machines, config.settings.train
        )
        for flops in (2e9, 20e9)
    )
    assert (short.products, short.total) == pytest.approx((2e-3, 7.2e-3))
    assert (long.products, long.total) == pytest.approx((20e-3, 20e-3))


def test_machines_add_up_the_sums_of_table_row_wise_tables_before_they_send_them() -> None:
    """Two machines of two: a table of 8 columns is on both processes of one machine, which exchange sums first."""
    dataset = described(read_sizes("1000"), "clicks", "x")
    row_wise, within = (
        step_work(
            command.plan_case(load_config(small(sharding={"default": kind})), dataset, Site(2, 2, read_device("cpu")))
        )
        for kind in ("row_wise", "table_row_wise")
    )
    sums = 16 * 8 * 4  # of 16 samples, for one process
    values = 13 * 16 + 16 + 16 * 8 + 8 + 9 * 16 + 16 + 16 + 1
    gradients = 2 * 4 * values * 3 / 4
    ids = 16 * 8
    assert row_wise.network_bytes == pytest.approx(2 / 3 * (2 * 4 * sums + ids) + gradients)
    assert within.network_bytes == pytest.approx(2 / 3 * (2 * 3 * sums / 2 + 3 * ids / 2) + gradients)
    assert within.link_bytes == pytest.approx(1 / 3 * (2 * 3 * sums / 2 + 3 * ids / 2) + 2 * 4 * sums / 2)


def replace_facts(**facts: float) -> Any:
    known = {"step_ms": 0.0, "several": 0.5, "link_gb_per_s": 4.0, "link_us": 1000.0}
    return read_device("cpu").model_copy(update=known | facts)


def test_the_verdict_has_the_words_of_a_real_run() -> None:
    from recmill.planning.forecast import StepTime

    step = StepTime(products=0.3, values=0.1, lookups=0.1, exchange=0.5, overhead=0.0)
    found = run_time(step, 100, saving=0.0, training_on_held_out=0.0, hints=Hints(2, True))
    assert found.verdict.kind == "exchange"
    assert found.verdict.text.startswith("exchange-bound 50 %: without it 2.00x; try a larger train.global_batch_size")
    assert found.hours == pytest.approx(100 / 3600)


def test_facts_are_found_again_from_steps_that_they_explain() -> None:
    """Costs of a made-up machine -> steps of the reference models -> the same costs."""
    random = np.random.default_rng(0)
    costs = random.random((8, 3)) + 0.1
    assert fitted_costs(costs, costs @ [2.0, 0.5, 3.0]) == pytest.approx([2.0, 0.5, 3.0])
    assert fitted_costs(costs, costs[:, :2] @ [2.0, 0.5] - 1e-3 * costs[:, 2])[2] == pytest.approx(0, abs=1e-9)


def test_work_that_seems_to_cost_nothing_gets_the_usual_cost_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    works = [Work(flops=1e9 * n, values=0.0, calls=n, lookups=0.0, row_values=0.0) for n in (1, 2, 3)]
    alone = [(work, 1e-3) for work in works]  # as fast with three times the flops
    found = device_from(alone, [(replace(work, collectives=1), 1e-3) for work in works], 2, (0.1, 0.1))
    usual = read_device("cpu")
    names = ("gemm_gflops", "memory_gb_per_s", "row_gb_per_s", "several", "link_gb_per_s")
    assert [getattr(found, name) for name in names] == [getattr(usual, name) for name in names]
    assert f"not measured: {', '.join(names)}" in caplog.text
    assert found.step_ms == pytest.approx(1.0)


def test_costs_that_explain_nothing_are_zero() -> None:
    assert fitted_costs(np.array([[0.0, -1.0], [0.0, -2.0]]), np.ones(2)).tolist() == [0.0, 0.0]


def test_a_disk_that_cannot_be_measured_is_found_before_steps_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "run_job", lambda *_, **__: pytest.fail("steps were measured"))
    with pytest.raises(ResourceError, match=r"--calibrate /proc/facts\.toml: a file cannot be written there"):
        calibrate.calibrate_machine("/proc/facts.toml")


def test_calibrated_facts_are_those_of_the_machine_that_was_measured(tmp_path: Path) -> None:
    device = replace_facts()
    known = {"step_ms": 1.0, "call_us": 20.0, "row_ns": 10.0, "row_gb_per_s": 30.0}
    known |= {"gemm_gflops": 100.0, "memory_gb_per_s": 9.0}
    device = device.model_copy(update=known)
    measured: dict[int, list[tuple[Work, float]]] = {1: [], 2: []}
    for procs, steps in measured.items():
        for reference in REFERENCES:
            config = load_config(reference.config(procs))
            sizes = read_sizes(",".join([str(reference.rows)] * reference.tables))
            dataset = described(replace(sizes, ids_per_row=[reference.ids] * reference.tables), "clicks", "x")
            case = command.plan_case(config, dataset, Site(1, procs, device))
            work = step_work(case)
            steps.append((work, step_time(work, device, case.machines, config.settings.train).total))
    found = device_from(measured[1], measured[2], 2, (0.1, 0.1))
    for name in (*known, "several", "link_gb_per_s", "link_us"):
        assert getattr(found, name) == pytest.approx(getattr(device, name), rel=1e-3), name
    file = tmp_path / "facts.toml"
    file.write_text(tomli_w.dumps(found.model_dump()), encoding="utf-8")
    assert read_device(str(file)) == found


def test_this_machine_can_be_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_ROUNDS", 1)
    monkeypatch.setattr(calibrate, "_TURNS", 2)
    file = tmp_path / "facts.toml"
    device = calibrate.calibrate_machine(file)
    assert read_device(str(file)) == device
    assert device.gemm_gflops > 0.1 and device.disk_gb_per_s > 0 and device.link_gb_per_s > 0
    assert [path.name for path in tmp_path.iterdir()] == ["facts.toml"]
    assert plan(small(), rows="1000,2000", device=str(file)).step.total > 0
    with pytest.raises(ConfigError, match="not the name of a file in an existing directory"):
        calibrate.calibrate_machine(tmp_path / "missing" / "facts.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nowhere: no such directory, so the sizes of tables are not known. Give them: --rows"),
        ({"rows": "criteo_1tb_40"}, "--rows: unknown dataset or file 'criteo_1tb_40'. Did you mean 'criteo_1tb_40m'"),
        ({"rows": "10,0"}, "--rows 10,0: a table has 1 to 1,099,511,627,776 rows"),
        ({"rows": "10,20", "ids_per_row": [1]}, "--ids-per-row has 1 numbers, and --rows 2"),
        ({"samples": 10}, "--samples and --ids-per-row go with --rows"),
        ({"rows": "10", "device": "a100"}, "--device: unknown device 'a100'. Did you mean 'a100-40gb'"),
        ({"rows": "10", "device": "no.toml"}, "--device no.toml: no such file. Write one: recmill plan --calibrate"),
        ({"rows": "10", "device": __file__ + ".toml"}, "no such file"),
        ({"rows": "10", "nodes": 100}, "train.global_batch_size = 64 for 100 processes"),
        ({"rows": "10", "plot": "a.png"}, "--plot a.png: use a name that ends in .svg"),
        ({"rows": "10", "node": 2}, "unknown argument of plan 'node'. Did you mean 'nodes'"),
    ],
)
def test_what_cannot_be_planned_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        plan(small(), **options)


def test_rows_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("1000\n2000, 30\n", encoding="utf-8")
    assert [table.rows for table in plan(small(), rows=str(tmp_path / "rows.txt")).tables] == [1000, 2000, 30]


def test_the_sizes_of_a_dataset_that_is_here_are_used(dlrm: Config) -> None:
    report = plan(dlrm)
    description = json.loads((Path(dlrm["data"]["path"]) / "dataset.json").read_text(encoding="utf-8"))
    assert {table.rows for table in report.tables} == {feature["rows"] for feature in description["sparse"]}
    assert report.run.steps == 13
    assert report.dataset_bytes == sum(file["bytes"] for file in description["files"].values())


def test_hours_and_money_of_a_run_on_criteo() -> None:
    """4,195,197,692 rows in steps of 65,536; 4.37 billion at 450,000 rows/s; 40 values of 4 bytes each."""
    report = plan("criteo_1tb/dlrm_torchrec", procs=8, device="h100-80gb", price_per_hour=98.0)
    batch = load_config("criteo_1tb/dlrm_torchrec").settings.train.global_batch_size
    assert report.run.steps == -(-4_195_197_692 // batch)
    assert report.run.training == pytest.approx(report.run.steps * report.step.total)
    assert report.cost == pytest.approx(98.0 * report.run.hours)
    assert report.preparation_hours == pytest.approx(4_373_472_329 / 450_000 / 3600)
    assert report.dataset_bytes == 4_373_472_329 * 40 * 4


def test_the_command_prints_and_exits_by_whether_it_fits(run_cli: RunCli, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(tomli_w.dumps(small()), encoding="utf-8")
    plotted = tmp_path / "scaling.svg"
    done = run_cli("plan", str(config), "--rows", "1000,2000", "--samples", "6400", "--plot", str(plotted))
    assert done.returncode == 0, done.stderr
    run, memory = done.stdout.splitlines()[-2:]  # what is wanted most comes last
    assert re.match(r"run: 100 steps, \d\.\d\d s \(training \d\.\d\d s, validation \d\.\d\d s, checkpoints ", run)
    assert memory.startswith("memory: fits, with ")
    for device, brackets in (("cpu", 2), ("a100-40gb", 1)):  # dense layers and activations; on a GPU activations alone
        shown = run_cli("plan", str(config), "--rows", "1000,2000", "--device", device).stdout
        assert len(re.findall(r"^\((?:dense|layers)\) ", shown, re.M)) == brackets
        assert shown.count("(in brackets: not in the total)\n") == 1
    sizes = [line.split()[0] for line in done.stdout.splitlines() if "-bound" in line][:-1]
    assert sizes == ["1", "2", "4", "8", "16", "32", "64"]  # up to a sample each
    assert plotted.read_text(encoding="utf-8").startswith("<?xml")
    assert run_cli("plan").returncode == 2
    done = run_cli("plan", str(config), "--rows", "1000,2000", "--price-per-hour", "3")
    assert "cost: not known, because the number of steps is not. Give --samples." in done.stdout
    assert done.stdout == f"{plan(config, rows='1000,2000', price_per_hour=3.0)}\n"
    done = run_cli("plan", str(config), "--rows", "100000000,200", "--memory-gb", "2", "--json")
    assert done.returncode == 5
    found = json.loads(done.stdout)
    assert not found["fits"] and found["changes"][0]["flags"].startswith("--set tables.store=cached_ssd")
    assert found["tables"][0]["bytes"]["rows"] == 100_000_000 * 8 * 4


def test_the_tables_of_a_plan_fit_80_columns_with_sizes_in_units_that_suit_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    report = plan(small(), rows="1000,200")
    long = [replace(table, table="table_a_column_with_a_long_name") for table in report.tables]
    print_plan(replace(report, tables=long), has_details=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if "  " in line]  # those of tables
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.startswith("a_column_with_a_long_name")]
    assert rows[0][:3] == ["a_column_with_a_long_name", "1,000", "8"]
    assert rows[0][5:7] == ["32.0", "kB"]  # 1,000 x 8 x 4 bytes
    assert len(rows) == 4, "two tables, in two blocks"


def test_help_imports_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from recmill.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "plan", "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--price-per-hour" in done.stdout
