"""The bookkeeping of `make gpu-validation`, and some of its steps on CPU."""

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from .. import gpu_validation
from ..gpu_validation import STEPS, Figures, Machine, SkippedError, Step, StepError, for_each, main, validate
from ..processes import born

REPO = Path(__file__).parents[2]


def passes(machine: Machine) -> Figures:
    return {"speed": 7}


def fails(machine: Machine) -> Figures:
    raise StepError("it is wrong", "\n".join(f"line {n}" for n in range(100)), {"speed": 3})


def breaks(machine: Machine) -> Figures:
    return {"speed": json.loads("{}")["none"]}


def is_skipped(machine: Machine) -> Figures:
    raise SkippedError("no GPU here")


def test_every_outcome_is_printed_and_written_and_a_failed_step_skips_those_that_need_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        Step("first", passes),
        Step("second", fails, ("first",)),
        Step("third", passes, ("first", "second")),
        Step("fourth", breaks),
        Step("fifth", is_skipped),
    ]
    machine = Machine("cpu", 2, tmp_path)
    results = validate(machine, {"devices": ["none"]}, tmp_path / "report.json", steps, range(1, 6))
    assert [result.outcome for result in results] == ["pass", "fail", "skipped", "fail", "skipped"]
    *printed, last = capsys.readouterr().out.splitlines()
    assert (tmp_path / "report.json").read_text() == last + "\n"
    found = json.loads(last)
    assert {key: found[key] for key in ("device", "procs", "devices", "pass", "fail", "skipped")} == {
        "device": "cpu",
        "procs": 2,
        "devices": ["none"],
        "pass": 1,
        "fail": 2,
        "skipped": 2,
    }
    first, second, third, fourth, fifth = found["steps"]
    assert (first["number"], first["name"], first["figures"], first["output"]) == (1, "first", {"speed": 7}, [])
    assert (second["reason"], second["figures"]) == ("it is wrong", {"speed": 3})
    assert second["output"] == [f"line {n}" for n in range(60, 100)]
    assert third["reason"] == "it needs 'second', which did not pass"
    assert fourth["reason"] == "KeyError: 'none'"
    assert 'json.loads("{}")["none"]' in "\n".join(fourth["output"])
    assert fifth["reason"] == "no GPU here"
    rows = [re.sub(r" +\d+\.\d s", "", line) for line in printed[-7:-2]]
    assert rows == [
        " 1  first   pass",
        " 2  second  fail  it is wrong",
        " 3  third   skipped  it needs 'second', which did not pass",
        " 4  fourth  fail  KeyError: 'none'",
        " 5  fifth   skipped  no GPU here",
    ]


def test_a_failed_step_gives_exit_code_1_and_keeps_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trains_nothing(machine: Machine) -> Figures:
        machine.recmill("train", "missing.toml", "--run", "run")
        return {}

    monkeypatch.setattr(gpu_validation, "about", lambda: {"devices": []})
    monkeypatch.setattr(gpu_validation, "STEPS", (Step("first", passes), Step("second", trains_nothing)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    arguments = ["--device", "cpu", "--output", str(tmp_path / "report.json")]
    assert main([*arguments, "--steps", "1"]) == 0
    assert list(tmp_path.glob("recmill-gpu-validation-*")) == []
    assert main(arguments) == 1
    (second,) = json.loads(capsys.readouterr().out.splitlines()[-1])["steps"][1:]
    assert second["outcome"] == "fail"
    assert re.fullmatch(r"exit code 2 instead of 0: .*recmill train missing\.toml --run run", second["reason"])
    assert "missing.toml" in "\n".join(second["output"])
    assert len(list(tmp_path.glob("recmill-gpu-validation-*/command-1.txt"))) == 1


def test_without_the_gpus_that_are_requested_nothing_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_validation, "about", lambda: {"devices": ["A100"]})
    assert main(["--procs", "2"]) == 1
    assert "torch sees 1 GPUs here" in capsys.readouterr().out


def test_all_cases_of_a_step_are_tried_and_all_failures_reported() -> None:
    def action(name: str) -> Figures:
        if name == "good":
            return {"difference": 0.0}
        raise StepError(f"{name} differs", f"output of {name}", {"difference": 1.0})

    with pytest.raises(StepError, match=r"^bad differs; worse differs$") as caught:
        for_each(["bad", "good", "worse"], action)
    assert caught.value.output == "output of bad"
    assert caught.value.figures["good"] == {"difference": 0.0}
    assert caught.value.figures["worse"] == {"failed": "worse differs", "difference": 1.0}


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    script = "sleep 1000 & echo $!; wait"
    with Machine("cpu", 1, tmp_path).start(["sh", "-c", script]) as command:
        command.wait_for(lambda: command.output().endswith("\n"), "its first line")
        child = int(command.output())
        with pytest.raises(StepError, match=r"^no end after 0\.01 s: sh -c "):
            command.wait(seconds=0.01)
        assert born(child)
    assert command.process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while born(child) and time.monotonic() < deadline:
        os.sched_yield()
    assert not born(child)


def write_run(path: Path, losses: list[float], auroc: float) -> Path:
    path.mkdir()
    lines = [{"split": "train", "step": n, "loss": loss, "samples_per_s": 5.0} for n, loss in enumerate(losses, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "results.json").write_text(json.dumps({"test": {"auroc": auroc, "logloss": None}}))
    return path


@pytest.mark.parametrize(
    ("losses", "auroc", "reason"),
    [
        ([0.5, 0.4, 0.302], 0.7, "ours and theirs: loss of step 3 is 0.302 and 0.3"),
        ([0.5, 0.4, float("nan")], 0.7, "ours and theirs: loss of step 3 is nan and 0.3"),
        ([0.5, 0.4], 0.7, r"ours and theirs: only one has \['loss of step 3'\]"),
        ([0.5, 0.4, 0.3], 0.702, "ours and theirs: auroc is 0.702 and 0.7"),
        ([0.5, 0.4, 0.3], None, "ours and theirs: auroc is None and 0.7"),
    ],
)
def test_runs_that_differ_are_a_failure(losses: list[float], auroc: Any, reason: str, tmp_path: Path) -> None:
    theirs = write_run(tmp_path / "theirs", [0.5, 0.4, 0.3], 0.7)
    with pytest.raises(StepError, match=f"^{reason}"):
        gpu_validation.compare_runs(write_run(tmp_path / "ours", losses, auroc), theirs)
    close = gpu_validation.compare_runs(write_run(tmp_path / "close", [0.5, 0.4, 0.3005], 0.7), theirs)
    assert close == {"loss_difference": pytest.approx(0.0005), "samples_per_s": 5, "metric_difference": 0.0}


def test_json_is_found_between_lines_of_libraries() -> None:
    output = 'NCCL version 2\n[rank0]: a warning\n{"auroc":\n 0.7}\n[W100] another\n'
    assert gpu_validation.printed_json(output) == {"auroc": 0.7}
    with pytest.raises(StepError, match=r"^no JSON in the output$"):
        gpu_validation.printed_json("[rank0]: a warning\n")


def test_the_documentation_lists_the_steps() -> None:
    page = (REPO / "docs" / "gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+ [^|]+) \|", page, flags=re.M)
    assert rows == [f"{number} {step.name}" for number, step in enumerate(STEPS, 1)]


def test_real_steps_pass_on_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`foreground_saves` needs the baseline, which is run first."""
    foreground = 1 + [step.name for step in STEPS].index("saves in the foreground")
    results = validate(Machine("cpu", 2, tmp_path), {}, tmp_path / "report.json", STEPS, [foreground])
    assert [(result.name, result.outcome) for result in results] == [
        ("CPU baseline", "pass"),
        ("saves in the foreground", "pass"),
    ], capsys.readouterr().out
    assert results[1].figures["loss_difference"] < 2e-5
