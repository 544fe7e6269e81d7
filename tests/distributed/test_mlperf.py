"""Logs of real runs, judged by MLPerf's own compliance checker."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlperf_logging.compliance_checker.mlp_compliance import make_checker

import recmill
from recmill.errors import ConfigError

from ..conftest import Config
from ..group import exit_code, train

Events = list[dict[str, Any]]
UNCHECKED = ("seed", "submission_status")  # the rules say nothing about them


@pytest.fixture
def config(dcnv2: Config) -> Config:
    """MLPerf's optimizer on small data: 13 steps, validations after 5, 10 and 13."""
    optimizer = {"name": "adagrad", "lr": 0.004, "eps": 1e-8}
    dcnv2 |= {"optim": {"dense": optimizer, "tables": optimizer}, "observe": {"mlperf": True}}
    dcnv2["checkpoint"]["background"] = False
    return dcnv2


def events_of(run: Path) -> Events:
    lines = (run / "mlperf.log").read_text().splitlines()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def complaints(events: Events, folder: Path) -> list[str]:
    """What the checker finds by the rules of version 6.0.0, warnings included."""
    log = folder / "edited.log"
    log.write_text("".join(f":::MLLOG {json.dumps(event)}\n" for event in events))
    checker = make_checker("training", "6.0.0", quiet=False, werror=True)
    checker.check_file(str(log), "training_6.0.0/common.yaml")
    return [*checker.overwritable.values(), *checker.not_overwritable]


def with_values(events: Events, **values: Any) -> Events:
    return [event | {"value": values.get(event["key"], event["value"])} for event in events]


def test_a_small_run_passes_in_the_open_division_and_fails_two_rules_of_the_closed_one(
    config: Config, tmp_path: Path
) -> None:
    train(config, tmp_path / "run", procs=2)
    log = tmp_path / "run" / "mlperf.log"
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", "training", "--ruleset", "6.0.0"]
    command += ["--werror", "--log_output", str(tmp_path / "checked.txt"), str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SUCCESS" in done.stderr
    events = events_of(tmp_path / "run")
    values = {event["key"]: event["value"] for event in events}
    assert (values["train_samples"], values["global_batch_size"], values["submission_division"]) == (1501, 125, "open")
    times = [event["time_ms"] for event in events if event["key"] not in ("cache_clear", "init_start")]
    assert times == sorted(times)
    metrics = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    expected = [(line["step"] / 13, line["auroc"]) for line in metrics if line["split"] == "val"]
    found = [(e["metadata"]["epoch_num"], e["value"]) for e in events if e["key"] == "eval_accuracy"]
    assert found == expected
    assert len(found) == 3

    closed = with_values(events, submission_division="closed")
    (samples, accuracy) = complaints(closed, tmp_path)
    assert "v['value'] == 89137319" in samples
    assert "v['value'] >= 0.80275" in accuracy
    large = with_values(closed, eval_samples=89137319, eval_accuracy=0.81)
    assert complaints(large, tmp_path) == []
    keys = {event["key"] for event in events}.difference(UNCHECKED)
    assert len(keys) == 27
    for key in keys:
        assert complaints([event for event in large if event["key"] != key], tmp_path), f"{key} may be missing"


def test_a_run_that_was_killed_twice_logs_every_event_once_and_says_where_it_was_resumed(
    config: Config, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert exit_code(recmill.train, config, run, fail="train.updated@step=7:kill") != 0
    assert exit_code(recmill.train, config, run, fail="train.end:kill") != 0
    killed = [event["key"] for event in events_of(run)]
    assert killed.count("run_stop") == 1, "it was killed after the end of training"
    train(config, run)
    events = events_of(run)
    assert complaints(events, tmp_path) == []
    assert [event["key"] for event in events] == killed
    steps = [event["metadata"]["step"] for event in events if event["key"] == "eval_stop"]
    assert steps == [5, 10, 13]
    (start,) = (event for event in events if event["key"] == "run_start")
    assert start["metadata"]["resumed_at_steps"] == [5, 13]
    assert [event["time_ms"] for event in events[2:]] == sorted(event["time_ms"] for event in events[2:])


def test_other_optimizers_are_logged_as_they_are_and_a_missed_target_is_no_success(
    config: Config, tmp_path: Path
) -> None:
    config["train"]["max_steps"] = 2
    config["eval"]["target_auroc"] = 1.0
    config["observe"]["mlperf_org"] = "ours"
    config["optim"] = {"dense": {"name": "adam", "weight_decay": 0.1}, "schedule": {"name": "step", "step_size": 3}}
    train(config, tmp_path)
    events = events_of(tmp_path)
    assert complaints(events, tmp_path) == []
    values = {event["key"]: event["value"] for event in events}
    assert values["submission_org"] == "ours"
    assert values["opt_name"] == {"dense": "adam", "tables": "rowwise_adagrad"}
    assert values["opt_weight_decay"] == {"dense": 0.1, "tables": 0.0}
    assert values["opt_learning_rate_decay_steps"] == 3
    assert values["opt_adagrad_epsilon"] == 1e-8, "of both"
    assert events[-1]["metadata"]["status"] == "aborted"


def test_a_log_that_cannot_be_complete_is_an_error_before_training(
    config: Config, dlrm: Config, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"MLPerf has no benchmark for model 'dlrm', only for dcnv2\. Remove it\."):
        recmill.train(dlrm | {"observe": {"mlperf": True}}, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"observe\.mlperf_org without observe\.mlperf does nothing\. Set both\."):
        recmill.train(dlrm | {"observe": {"mlperf_org": "ours"}}, tmp_path / "other")
    config["observe"] = {}
    assert exit_code(recmill.train, config, tmp_path / "run", fail="train.updated@step=7:kill") != 0
    with pytest.raises(ConfigError, match=r"mlperf\.log is missing, so observe\.mlperf cannot log the first steps"):
        recmill.train(config | {"observe": {"mlperf": True}}, tmp_path / "run")
