"""When training ends, what is validated on the way, and which checkpoint is the best."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recmill
from recmill import prepare
from recmill.commands.results import results
from recmill.errors import CheckpointError, ConfigError, DataError, UserError

from ..group import evaluate, exit_code, in_group, train
from .runs import assert_same_run, close_to, loss_by_step, metric_lines

Config = dict[str, Any]


def status(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text(encoding="utf-8"))


def validations(run: Path, name: str = "auroc") -> dict[int, float]:
    return {line["step"]: line[name] for line in metric_lines(run) if line["split"] == "val"}


def test_a_target_ends_the_run_at_the_first_validation_that_reaches_it(dlrm: Config, tmp_path: Path) -> None:
    dlrm["train"]["num_epochs"] = 2
    dlrm["eval"] |= {"before_training": True, "each_epoch": True}
    train(dlrm, tmp_path / "whole")
    found = validations(tmp_path / "whole")
    assert list(found) == [0, 5, 10, 13, 15, 20, 25, 26]
    values = [found[step] for step in (5, 10, 13, 15, 20, 25, 26)]  # the baseline does not count
    target = sorted(values)[2]
    expected = next(step for step in found if step and found[step] >= target)
    results = train(dlrm, tmp_path / "run", procs=2, overrides=[f"eval.target_auroc={target - 1e-6}"])
    assert status(tmp_path / "run")["state"] == "done"
    assert status(tmp_path / "run")["step"] == expected
    assert "validation reached auroc" in status(tmp_path / "run")["end"]
    assert results["val"]["auroc"] == pytest.approx(found[expected], rel=1e-6)
    assert 0 < results["test"]["auroc"] < 1
    assert list(validations(tmp_path / "run")) == [step for step in found if step <= expected]
    assert train(dlrm, tmp_path / "run", overrides=[f"eval.target_auroc={target - 1e-6}"]) == results  # finished
    train(dlrm, tmp_path / "run")  # without a target it continues to the end, as if it had never ended
    assert loss_by_step(tmp_path / "run") == pytest.approx(loss_by_step(tmp_path / "whole"), rel=2e-5)
    assert status(tmp_path / "run")["end"] == "all steps done"


@pytest.mark.parametrize("model", ["dlrm", "bert4rec"])
def test_patience_ends_a_run_that_gets_worse_and_the_best_checkpoint_stays(
    model: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    config = request.getfixturevalue(model)
    rate = 15.0 if model == "dlrm" else 3.0  # so high that it soon gets worse
    config["optim"] = {"dense": {"name": "sgd", "lr": rate}, "tables": {"name": "sgd", "lr": rate}}
    config["train"]["num_epochs"] = 30
    config["eval"] |= {"every_steps": 2, "patience": 3}
    config["checkpoint"] = {"keep_best": True, "every_steps": 1000}
    train(config, tmp_path / "run", procs=2, overrides=["train.max_steps=3"])  # a patience that is resumed
    results = train(config, tmp_path / "run")
    name = "auroc" if model == "dlrm" else "full/ndcg@10"
    found = validations(tmp_path / "run", name)
    best = max(found, key=lambda step: (found[step], -step))
    at = status(tmp_path / "run")
    assert (at["best_step"], at["best"]) == (best, found[best])
    assert "for eval.patience = 3" in at["end"]
    assert [step for step in found if step > best] == list(found)[-3:]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert f"step-{best:08d}" in kept
    assert len(kept) <= 3
    assert results["val"][name] == pytest.approx(found[best], rel=1e-6)
    assert evaluate(tmp_path / "run", split="val", checkpoint="newest")[name] == pytest.approx(
        found[max(found)], rel=1e-6
    )
    evaluated = evaluate(tmp_path / "run", split="val", checkpoint="best")
    assert {key: evaluated[key] for key in results["val"]} == results["val"]  # for histories there is popularity, too


@pytest.fixture
def worsening(dlrm: Config) -> Config:
    """4 steps with a rate that is far too high: validation at step 2 is better than at step 4."""
    dlrm["optim"] = {"dense": {"name": "sgd", "lr": 30.0}, "tables": {"name": "sgd", "lr": 30.0}}
    dlrm["train"] |= {"max_steps": 4, "seed": 3}
    dlrm["eval"]["every_steps"] = 2
    return dlrm


def test_the_best_checkpoint_is_what_is_tested_and_reported(worsening: Config, tmp_path: Path) -> None:
    """By one process and by two, and by a run that was killed between its last step and the test."""
    worsening["checkpoint"] = {"keep_best": True}
    reported = train(worsening, tmp_path / "run")
    found = validations(tmp_path / "run")
    assert found[2] > found[4]
    checkpoint = {"step": 2, "checkpoint": "checkpoints/step-00000002"}
    assert {key: reported["test"][key] for key in checkpoint} == checkpoint
    assert reported["val"]["auroc"] == found[2]
    written = json.loads((tmp_path / "run" / "results.json").read_text(encoding="utf-8"))
    assert written.pop("timing")["verdict"] == "too few steps to say what limits them: 0 after the warm-up"
    assert reported == written
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert log.index("finished at step 4: all steps done") < log.index("testing step 2, the best by validation")
    assert [line["step"] for line in metric_lines(tmp_path / "run") if line["split"] == "test"] == [2]
    assert (status(tmp_path / "run")["step"], status(tmp_path / "run")["tested_step"]) == (4, 2)
    (report,) = results(tmp_path / "run").select("best_step", "tested_step", "checkpoint").rows()
    assert report == (2, 2, "checkpoints/step-00000002")

    evaluated = evaluate(tmp_path / "run")
    assert evaluated == evaluate(tmp_path / "run", checkpoint="best") == reported["test"]
    newest = evaluate(tmp_path / "run", checkpoint="newest")
    assert newest["step"] == 4
    assert newest["auroc"] != evaluated["auroc"]

    assert train(worsening, tmp_path / "two", procs=2)["test"] == close_to(reported["test"])
    assert exit_code(recmill.train, worsening, tmp_path / "killed", fail="train.end:kill") != 0
    assert not (tmp_path / "killed" / "results.json").exists()
    assert train(worsening, tmp_path / "killed") == reported
    assert_same_run(tmp_path / "killed", tmp_path / "run")


def test_a_new_run_starts_from_the_newest_the_best_or_a_named_step_of_another(
    worsening: Config, tmp_path: Path
) -> None:
    worsening["checkpoint"] = {"keep_best": True}
    earlier = tmp_path / "a@b"
    train(worsening, earlier)
    for number, (start, step) in enumerate([("", 4), ("@best", 2), ("@2", 2), ("@4", 4)]):
        run = tmp_path / str(number)
        train(worsening, run, init_from=f"{earlier}{start}", overrides=["train.max_steps=1"])
        log = (run / "log.txt").read_text(encoding="utf-8")
        assert f"starting from step {step} of another run: {earlier}/checkpoints/step-{step:08d}" in log
    with pytest.raises(CheckpointError, match=r"a@b: no checkpoint of step 3. There are: 2, 4."):
        recmill.train(worsening, tmp_path / "new", init_from=f"{earlier}@3")
    assert not (tmp_path / "new").exists()


def test_a_best_that_was_not_kept_is_not_replaced_by_another(worsening: Config, tmp_path: Path) -> None:
    train(worsening, tmp_path / "run")
    found = validations(tmp_path / "run")
    assert found[2] > found[4]  # and only step 4 is on disk
    with pytest.raises(CheckpointError, match=r"no best checkpoint. Only a run with checkpoint.keep_best"):
        evaluate(tmp_path / "run", checkpoint="best")
    with pytest.raises(CheckpointError, match=r"no best checkpoint. Only a run with checkpoint.keep_best"):
        recmill.train(worsening, tmp_path / "new", init_from=f"{tmp_path / 'run'}@best")
    worsening["checkpoint"] = {"keep_best": True}
    tested = train(worsening, tmp_path / "run")  # finished: only its test is repeated
    assert tested["test"]["step"] == evaluate(tmp_path / "run")["step"] == 4
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert "the best checkpoint, of step 2, was not kept: testing step 4." in log


def test_drop_last_of_less_than_a_batch_is_an_error(dlrm: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fewer rows for training than one train.global_batch_size of 2,000"):
        train(dlrm, tmp_path / "run", overrides=["data.drop_last=true", "train.global_batch_size=2000"])


def test_batches_of_one_row_and_so_of_one_class_train_on_two_processes(dlrm: Config, tmp_path: Path) -> None:
    """One process of the two has nothing but a filler in each step."""
    keys = ["train.global_batch_size=1", "data.limit_train_batches=4", "eval.every_steps=100"]
    train(dlrm, tmp_path / "two", procs=2, overrides=keys)
    train(dlrm, tmp_path / "one", overrides=keys)
    assert list(loss_by_step(tmp_path / "two")) == [1, 2, 3, 4]
    assert loss_by_step(tmp_path / "two") == pytest.approx(loss_by_step(tmp_path / "one"), rel=2e-5)


def test_more_processes_than_rows_train_validate_and_test(dlrm: Config, tmp_path: Path) -> None:
    """2 rows for training, 1 for validation and 1 for the test: each a set of one class, without an AUROC."""
    prepare("synthetic-clicks", tmp_path / "d", rows=4, days=2, dense=3, tables=[5, 50])
    keys = [f"data.path={tmp_path / 'd'}", "train.num_epochs=3", "eval.patience=2", "checkpoint.keep_best=true"]
    three = train(dlrm, tmp_path / "three", procs=3, overrides=[*keys, "eval.every_steps=1"])
    one = train(dlrm, tmp_path / "one", overrides=[*keys, "eval.every_steps=1"])
    assert three["test"]["auroc"] == one["test"]["auroc"] == "undefined"
    assert (three["val"]["rows"], three["test"]["rows"]) == (1, 1)
    assert three["test"]["logloss"] == pytest.approx(one["test"]["logloss"], rel=2e-5)
    assert loss_by_step(tmp_path / "three") == pytest.approx(loss_by_step(tmp_path / "one"), rel=2e-5)
    assert (status(tmp_path / "three")["step"], status(tmp_path / "three")["best"]) == (2, None)


def test_a_value_that_is_bad_for_one_of_two_processes_ends_both_with_one_error(
    dlrm: Config, clicks: Path, tmp_path: Path
) -> None:
    """NaN in a row of the test, which comes last: the checkpoints before it stay."""
    copy = Path(shutil.copytree(clicks, tmp_path / "copy"))
    dense = np.load(copy / "day_3_dense.npy", mmap_mode="r+")
    dense[-1, 0] = np.nan
    dense.flush()
    keys = [f"data.path={copy}", "eval.every_steps=100"]
    fact = rf"day_3_dense.npy: row {len(dense) - 1}, column I1: nan is not a finite number"
    with pytest.raises(DataError, match=fact):
        train(dlrm, tmp_path / "run", procs=2, overrides=keys, verify=False)
    assert status(tmp_path / "run")["state"] == "failed"
    assert (tmp_path / "run" / "checkpoints" / "step-00000013" / "MANIFEST.json").is_file()


@pytest.mark.parametrize("name", ["adam", "adagrad", "sgd"])
def test_a_learning_rate_that_is_far_too_high_is_one_error(name: str, dlrm: Config, tmp_path: Path) -> None:
    tables = "rowwise_adagrad" if name == "adam" else name
    dlrm["optim"] = {"dense": {"name": name, "lr": 1e30}, "tables": {"name": tables, "lr": 1e30}}
    with pytest.raises(UserError, match=r"no longer a finite number from step \d on.* Train again with lower"):
        train(dlrm, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def one_after_the_other(config: Config, runs: list[Path]) -> None:
    for run in runs:
        recmill.train(config, run)


def test_runs_of_one_process_have_a_log_each(dlrm: Config, tmp_path: Path) -> None:
    """As in a program under torchrun, which has not set up any logging."""
    dlrm["train"]["max_steps"] = 2
    runs = [tmp_path / name for name in ("a", "b")]
    in_group(1, one_after_the_other, dlrm, runs)
    for run in runs:
        text = (run / "log.txt").read_text(encoding="utf-8")
        assert [text.count(line) for line in ("step 1  loss", "finished at step 2")] == [1, 1]


def rates(run: Path) -> dict[int, float]:
    return {line["step"]: line["lr"] for line in metric_lines(run) if line["split"] == "train"}


def test_shares_of_the_run_are_those_of_the_number_of_steps_that_a_resumed_run_has(
    dlrm: Config, tmp_path: Path
) -> None:
    """13 steps, killed after 7 and resumed; then 26, of which 13 are done."""
    linear = {"name": "linear", "decay_start_step": "50%", "decay_steps": "to the end"}
    dlrm["optim"] = {"dense": {"name": "sgd", "lr": 1.0}, "schedule": linear}
    dlrm["eval"]["every_steps"] = "30%"
    train(dlrm, tmp_path / "unbroken")
    assert exit_code(recmill.train, dlrm, tmp_path / "run", fail="train.step@step=7:kill") != 0
    train(dlrm, tmp_path / "run", procs=2)
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")
    expected = dict.fromkeys(range(1, 9), 1.0) | {9: 5 / 6, 10: 4 / 6, 11: 3 / 6, 12: 2 / 6, 13: 1 / 6}
    assert rates(tmp_path / "run") == pytest.approx(expected)
    assert list(validations(tmp_path / "run")) == [4, 8, 12, 13]
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert log.count("schedule: decay from step 7 to 13, validation every 4 steps, checkpoint every 5 steps") == 2
    assert "the run had" not in log

    train(dlrm, tmp_path / "run", overrides=["train.num_epochs=2"])
    found = rates(tmp_path / "run")
    assert {step: found[step] for step in (13, 14, 15, 26)} == pytest.approx(
        {13: 1 / 6, 14: 1, 15: 12 / 13, 26: 1 / 13}
    )
    log = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert log.count("the run had 13 steps and now has 26, ") == 1
    assert "the learning rate of step 14 is 1 instead of 0." in log


def test_a_run_that_is_likely_to_disappoint_says_so_once(bert4rec: Config, tmp_path: Path) -> None:
    """Its learning rate is as good as 0, so random rankings are as good as it gets."""
    bert4rec["optim"] = {"dense": {"lr": 1e-30}, "tables": {"lr": 1e-30}}
    bert4rec["train"]["max_steps"] = 4
    bert4rec["eval"]["every_steps"] = 1
    results = train(bert4rec, tmp_path / "run", procs=2)
    assert not [name for name in results["val"] if "popularity" in name]
    lines = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8").splitlines()
    (popularity,) = [line for line in lines if "ranking by popularity" in line]
    baseline = evaluate(tmp_path / "run", split="val")["popularity/full/ndcg@10"]
    assert f"validation at step 1 reached {results['val']['full/ndcg@10']:.4f}, less than" in popularity
    assert f"which reaches {baseline:.4f}. Train longer (train.num_epochs), or change" in popularity
    (best,) = [line for line in lines if "has not improved" in line]
    assert "validation has not improved since step 1" in best
