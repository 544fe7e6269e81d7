"""What was run decides: with injected results, and with child processes that really die. No test depends on speed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from recmill import train
from recmill.hardware import precision, probe
from recmill.hardware.precision import Dtype, Finding, verdict, worker_environment

from ..mixed_precision import MixedPrecision

Config = dict[str, Any]
DIES = (None, "is killed by SIGILL", True)


@pytest.fixture(autouse=True)
def new_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "RECMILL_PRECISION", "RECMILL_FAIL"):
        monkeypatch.delenv(name, raising=False)


class Children:
    """In place of child processes: what they would answer, by ONEDNN_MAX_CPU_ISA, and which were run."""

    def __init__(self, **answers: tuple[float | None, str, bool]) -> None:
        self.answers = {"": DIES} | answers
        self.isas: list[str] = []

    def __call__(self, dtype: Dtype, threads: int, isa: str) -> tuple[float | None, str, bool]:
        self.isas.append(isa)
        return self.answers.get(isa, DIES)


@pytest.mark.parametrize(("ratio", "is_usable"), [(1.84, True), (1.0, False), (0.6, False)])
def test_what_works_with_all_features_is_used_if_it_is_faster(
    ratio: float, is_usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(**{"": (ratio, "", True)})
    monkeypatch.setattr(precision, "_run", children)
    finding = precision.probe("bfloat16", 2)
    assert finding == Finding("bfloat16", ratio)
    assert children.isas == [""]
    assert verdict(finding)[0] is is_usable
    assert "ONEDNN_MAX_CPU_ISA" not in worker_environment(finding)


@pytest.mark.parametrize(
    ("dtype", "works", "tried"),
    [
        ("bfloat16", "AVX512_CORE_BF16", ["", "AVX512_CORE_BF16"]),
        ("bfloat16", "AVX2", ["", "AVX512_CORE_BF16", "AVX512_CORE", "AVX2"]),
        ("float16", "AVX512_CORE_FP16", ["", "AVX512_CORE_FP16"]),
    ],
)
def test_what_dies_with_all_features_is_tried_with_fewer(
    dtype: Dtype, works: str, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(**{works: (1.5, "", True)})
    monkeypatch.setattr(precision, "_run", children)
    finding = precision.probe(dtype, 1)
    assert children.isas == tried
    assert finding == Finding(dtype, 1.5, works, "is killed by SIGILL")
    is_usable, why = verdict(finding)
    assert not is_usable  # this process was started without the setting
    assert why.endswith(f"To use it: export ONEDNN_MAX_CPU_ISA={works}")
    for name, value in worker_environment(finding).items():
        monkeypatch.setenv(name, value)
    assert verdict(finding)[0]
    assert precision.probe(dtype, 99) == finding  # a worker decides by what its launcher found
    assert children.isas == tried


def test_what_needs_fewer_features_and_is_slow_changes_nothing_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_run", Children(AVX512_CORE_BF16=(0.6, "", True)))
    finding = precision.probe("bfloat16", 1)
    assert "ONEDNN_MAX_CPU_ISA" not in worker_environment(finding)
    expected = (
        "measured 0.60 of float32's speed on this CPU with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, "
        "without which a product is killed by SIGILL"
    )
    assert verdict(finding) == (False, expected)


def test_what_never_works_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children()
    monkeypatch.setattr(precision, "_run", children)
    assert verdict(precision.probe("float16", 1)) == (False, "a product is killed by SIGILL on this CPU")
    assert children.isas == ["", "AVX512_CORE_FP16", "AVX512_CORE", "AVX2"]


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_user_s_own_setting_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "AVX512_CORE_AMX")
    children = Children(AVX2=(2.0, "", True))
    monkeypatch.setattr(precision, "_run", children)
    assert precision.probe("bfloat16", 1).ratio is None
    assert children.isas == [""]


def kept_file(home: Path) -> Path:
    (path,) = (home / ".cache" / "recmill").glob("precision-*")
    return path


def test_a_finding_is_kept_and_a_corrupt_one_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(AVX512_CORE_BF16=(0.5, "", True))
    monkeypatch.setattr(precision, "_run", children)
    finding = precision.probe("bfloat16", 2)
    assert precision.probe("bfloat16", 2) == finding
    assert len(children.isas) == 2
    corrupt = ["", "{", "[1]", "\0", "[" * 100_000, '{"dtype": "float16"}', '{"dtype": "bfloat16", "ratio": "fast"}']
    corrupt += ['{"dtype": "bfloat16", "max_isa": 5}', '{"dtype": "bfloat16", "problem": []}']
    for text in corrupt:
        kept_file(tmp_path).write_text(text)
        assert precision.probe("bfloat16", 2) == finding
    assert len(children.isas) == 2 + 2 * len(corrupt)
    assert json.loads(kept_file(tmp_path).read_text())["max_isa"] == "AVX512_CORE_BF16"


def test_a_finding_holds_for_one_machine_and_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    children = Children(**{"": (2.0, "", True)})
    monkeypatch.setattr(precision, "_run", children)
    precision.probe("bfloat16", 2)
    precision.probe("float16", 2)
    precision.probe("bfloat16", 1)
    monkeypatch.setattr("platform.node", lambda: "another machine of the same kind")
    precision.probe("bfloat16", 2)
    monkeypatch.setattr(precision.metadata, "version", lambda package: "9.9")
    precision.probe("bfloat16", 2)
    assert len(children.isas) == 5


def test_what_may_be_different_the_next_time_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_MAX_SECONDS", 0.01)
    assert precision.probe("bfloat16", 1) == Finding("bfloat16", problem="gives no result within 0 s")
    assert list((tmp_path / ".cache" / "recmill").iterdir()) == []


def test_without_a_cache_it_is_run_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    children = Children(**{"": (2.0, "", True)})
    monkeypatch.setattr(precision, "_run", children)
    assert precision.probe("bfloat16", 1) == precision.probe("bfloat16", 1) == Finding("bfloat16", 2.0)
    assert len(children.isas) == 2


@pytest.mark.parametrize("bad", [1.2, torch.nan, torch.inf])
def test_wrong_products_do_not_pass(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([[torch.ones(4), torch.ones(4)], [torch.tensor([1.0, bad, 1.0, 1.0]), torch.ones(4)]])
    monkeypatch.setattr(probe, "_all_products", lambda: next(results))
    assert "gives wrong products" in str(probe.measure("bfloat16")["problem"])


@pytest.mark.parametrize(
    ("action", "problem", "is_certain"),
    [
        ("sigill", "is killed by SIGILL", True),
        ("kill", "is killed by SIGKILL", False),
        ("raise", "fails (requested by RECMILL_FAIL at probe.all_features)", True),
    ],
)
def test_a_child_that_dies_or_fails_is_reported(
    action: str, problem: str, is_certain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECMILL_FAIL", f"probe.all_features:{action}")
    assert precision._run("bfloat16", 1, "") == (None, problem, is_certain)


def test_where_all_features_kill_workers_are_started_with_fewer(
    dlrm: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child dies with all features, another multiplies with fewer. Only its speed is not its own."""
    monkeypatch.setenv("RECMILL_FAIL", "probe.all_features:sigill")
    run_child = precision._run

    def run_fast_child(dtype: Dtype, threads: int, isa: str) -> tuple[float | None, str, bool]:
        ratio, problem, is_certain = run_child(dtype, threads, isa)
        return (None if ratio is None else 1.25), problem, is_certain

    monkeypatch.setattr(precision, "_run", run_fast_child)
    dlrm["train"] |= {"precision": "bfloat16", "max_steps": 2, "kernels": "torch"}
    train(dlrm, tmp_path / "run", procs=2)
    expected = (
        r"train\.precision = 'bfloat16': measured 1\.25 times float32's speed on this CPU "
        r"with ONEDNN_MAX_CPU_ISA=AVX\w+, without which a product is killed by SIGILL"
    )
    assert re.search(expected, (tmp_path / "run" / "log.txt").read_text(encoding="utf-8"))
    assert json.loads(kept_file(tmp_path).read_text())["ratio"] == 1.25


def test_where_nothing_works_training_is_that_of_float32(
    dlrm: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dlrm["train"] |= {"max_steps": 2, "kernels": "torch"}
    expected = train(dlrm, tmp_path / "float32")
    monkeypatch.setattr(precision, "_run", Children())
    dlrm["train"] |= {"precision": "float16"}
    assert train(dlrm, tmp_path / "run") == expected
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "train.precision = 'float16' is off, training in float32: a product is killed by SIGILL on this CPU" in log


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_this_cpu_is_probed_for_real(dtype: Dtype, mixed: MixedPrecision) -> None:
    """Whatever it finds: pytest's last lines say what."""
    finding = mixed.finding(dtype)
    assert finding.dtype == dtype
    assert finding.ratio is None or finding.ratio > 0
    assert bool(finding.problem) == (finding.ratio is None or bool(finding.max_isa))
