import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recmill.errors import CheckpointError, ResourceError
from recmill.observe.run_dir import RunDirectory


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from recmill.observe.run_dir import RunDirectory\n"
        "with RunDirectory(sys.argv[1]).locked():\n"
        "    print('mine', flush=True)\n"
        "    time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"mine\n"
    owner.kill()
    owner.communicate()
    assert f"process {owner.pid} on" in (tmp_path / ".lock").read_text()
    with RunDirectory(tmp_path).locked():
        assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_the_end_of_a_run_removes_what_a_killed_process_left_of_its_status(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    (tmp_path / f".status.json.{gone.pid}").touch()
    run = RunDirectory(tmp_path)
    run.write_status("running", step=5)
    run.write_status("interrupted", step=5)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_run_that_has_ended_is_not_set_to_running_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_status("running", step=5)
    run.write_status("done", step=10)
    run.write_status("running", step=10)
    assert run.read_status()["state"] == "done"


def test_metrics_after_a_step_and_an_incomplete_line_are_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
    with run.metrics_file.open("a") as file:
        file.write('{"step": 1, "lo')
    run.forget_metrics_after(2)
    assert [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()] == [1, 2]


def test_bytes_that_are_not_utf_8_do_not_prevent_a_resume(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_metrics({"step": 1})
    with run.metrics_file.open("ab") as file:
        file.write(b'\xff\n{"step": 2, "split": "\xff"}\n')
    run.append_metrics({"step": 3})
    run.forget_metrics_after(2)
    assert [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()] == [1, 2]


def test_a_pipe_or_a_link_to_itself_in_place_of_the_metrics_is_refused_when_a_run_starts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for make in (os.mkfifo, lambda path: path.symlink_to(path.name)):  # appending would wait for a reader, or fail
        run.metrics_file.unlink(missing_ok=True)
        make(run.metrics_file)
        with pytest.raises(ResourceError, match=r"metrics.jsonl is not a file\. Remove it"):
            run.forget_metrics_after(2)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_directory_that_is_removed_while_in_use_is_noticed(tmp_path: Path, is_replaced: bool) -> None:
    run = RunDirectory(tmp_path / "run")
    with run.locked():
        run.append_metrics({"step": 1})
        shutil.rmtree(run.path)
        if is_replaced:
            run.path.mkdir()
            (run.path / ".lock").touch()
        with pytest.raises(ResourceError, match=r"run or its file .lock was removed or replaced while"):
            run.append_metrics({"step": 2})
        with pytest.raises(ResourceError, match=r"or its file .lock was removed or replaced"):
            run.write_status("running", step=2)
    assert not run.metrics_file.exists()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], None),
        ([".lock", "log.txt", "log.rank-1.txt", ".status.json.17"], None),
        (["status.json", "anything"], None),
        (["status.json", "dataset.json"], "dataset.json"),
        (["config.toml", "checkpoints/step-00000003/MANIFEST.json"], None),  # a run without its status.json
        (["config.toml", "checkpoints/model.pt"], "checkpoints"),
        (["log.txt", "thesis.tex"], "thesis.tex"),
    ],
)
def test_a_file_of_something_else_shows_that_a_directory_is_not_a_run_s(
    files: list[str], expected: str | None, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert RunDirectory(tmp_path).foreign_file() == expected


@pytest.mark.parametrize("text", ["\0", "[1]", "[" * 100_000])
def test_a_status_that_is_not_json_is_an_error_with_its_path(text: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.status_file.write_text(text)
    with pytest.raises(CheckpointError, match=r"status\.json: not readable as JSON. Replace it with \{\}"):
        run.read_status()
