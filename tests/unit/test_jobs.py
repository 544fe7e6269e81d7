"""What became of a job: the end of its script, the scheduler's words, and the state of the run that follows."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recmill.commands.jobs import cancel, logs, status
from recmill.commands.launch import launch
from recmill.commands.results import run_report
from recmill.errors import ConfigError, ResourceError
from recmill.files.atomic import write_json
from recmill.jobs import schedulers
from recmill.jobs.records import Record, is_cancel_requested, note_job, read_job_end, read_jobs, write_job_end
from recmill.jobs.schedulers import started_at
from recmill.launch.failures import report_failure
from recmill.observe.printed import print_status
from recmill.observe.run_dir import RunDirectory

from ..processes import wait_until


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    return tmp_path / "run"


def note(run: Path, launcher: str = "slurm", job_id: str = "7", **facts: Any) -> None:
    note_job(
        run / "jobs", Record(launcher, job_id, "recmill-a", 2, 1, "2026-01-01T00:00:00Z", socket.gethostname(), **facts)
    )


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Put a program on the PATH that prints what the real one printed; it notes its arguments in NAME.calls."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    file = tmp_path / "bin" / name
    file.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}.calls\n{text}\n', encoding="utf-8")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")


QUEUED = "echo 'PENDING|Resources'"
RUNNING = "echo 'RUNNING|None'"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
DONE = {"state": "done", "step": 9}
STOPPED = {"state": "preempted", "step": 5, "reason": "SIGUSR2"}


@pytest.mark.parametrize(
    ("squeue", "own", "end", "expected", "reason"),
    [
        (QUEUED, None, None, "queued", "Resources"),
        (QUEUED, STOPPED, None, "queued", "Resources"),  # requeued
        (RUNNING, None, None, "running", ""),
        (RUNNING, {"state": "running", "step": 3}, None, "running", ""),
        (FORGOTTEN, DONE, {"state": "done"}, "done", ""),
        ("echo 'COMPLETED|None'", DONE, {"state": "done"}, "done", ""),
        (FORGOTTEN, STOPPED, None, "preempted", "SIGUSR2"),
        ("echo 'NODE_FAIL|None'", {"state": "running", "step": 3}, None, "lost", "Launch it again to resume"),
        (FORGOTTEN, None, None, "lost", "Launch it again to resume"),
        (FORGOTTEN, {"state": "running", "step": 3}, {"state": "failed", "reason": "killed"}, "failed", "killed"),
        (DOWN, {"state": "running", "step": 3}, None, "running", "Unable to contact slurm controller"),
    ],
)
def test_the_state_of_a_run_follows_from_its_files_and_its_scheduler(
    squeue: str, own: Any, end: Any, expected: str, reason: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(run.parent, monkeypatch, "squeue", squeue)
    note(run)
    if own:
        write_json(run / "status.json", own)
    if end:
        write_job_end(run / "jobs", "7", end)
    found = status(run)
    assert found.state == expected
    assert reason in found.reason
    assert (found.job, found.step) == ("7", own["step"] if own else 0)


def test_a_scheduler_that_does_not_answer_leaves_the_last_known_state(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedulers, "_SECONDS", 0.1)
    program(run.parent, monkeypatch, "squeue", "exec sleep 60")
    note(run)
    write_json(run / "status.json", {"state": "running", "step": 3})
    found = status(run)
    assert (found.state, found.step, found.job_state) == ("running", 3, "unknown")
    assert "squeue did not answer within 0.1 s" in found.reason


def test_a_job_on_another_cluster_of_slurm_is_asked_for_and_stopped_there(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in (("squeue", f"echo CLUSTER: other; {RUNNING}"), ("scancel", "")):
        program(run.parent, monkeypatch, name, answer)
    note(run, cluster="other")
    assert cancel(run) == ["7"]
    assert "--clusters=other -h -t all -j 7" in (run.parent / "squeue.calls").read_text()
    assert (run.parent / "scancel.calls").read_text() == "--clusters=other --signal=USR2 7\n"


def test_a_job_that_ends_while_its_scheduler_is_asked_is_not_lost(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(run / "status.json", {"state": "running", "step": 3})
    program(run.parent, monkeypatch, "squeue", f"""echo '{json.dumps(STOPPED)}' > {run}/status.json; {FORGOTTEN}""")
    note(run)
    assert (status(run).state, status(run).step) == ("preempted", 5)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"job_state": "Q", "comment": "Not Running: Insufficient amount of resource"}, "queued"),
        ({"job_state": "R"}, "running"),
        ({"job_state": "F", "Exit_status": 75}, "preempted"),
    ],
)
def test_pbs_states_are_read_from_qstat(facts: Any, expected: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps({"pbs_version": "2025", "Jobs": {"7.server": facts}})
    program(run.parent, monkeypatch, "qstat", f"echo '{answer}'")
    note(run, "pbs", "7.server")
    write_json(run / "status.json", STOPPED)
    found = status(run)
    assert found.state == expected
    assert found.reason == facts.get("comment", "SIGUSR2" if expected == "preempted" else "")


def test_a_pbs_job_that_vanished_is_lost(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(run.parent, monkeypatch, "qstat", "echo 'qstat: Unknown Job Id 7.server' >&2; exit 153")
    note(run, "pbs", "7.server")
    assert status(run).state == "lost"


def ended(kind: str) -> dict[str, Any]:
    return {"conditions": [{"type": "Suspended", "status": "False"}, {"type": kind, "status": "True"}]}


@pytest.mark.parametrize(
    ("kind", "answer", "expected"),
    [
        ("job", {"active": 2, "ready": 2}, "running"),
        ("job", {"active": 2, "ready": 0}, "queued"),
        ("job", ended("Complete"), "done"),
        ("jobset", {"restarts": 1, "replicatedJobsStatus": [{"name": "node", "active": 1, "ready": 1}]}, "running"),
        ("jobset", {"replicatedJobsStatus": [{"name": "node", "active": 1, "ready": 0}]}, "queued"),
        ("jobset", ended("Completed"), "done"),
        ("trainjob", {"jobsStatus": [{"name": "node", "active": 1, "ready": 1}]}, "running"),
        ("trainjob", {}, "queued"),
        ("trainjob", ended("Complete"), "done"),
    ],
)
def test_kubernetes_states_are_read_from_the_kind_that_was_created(
    kind: str, answer: Any, expected: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(run.parent, monkeypatch, "kubectl", f"echo '{json.dumps({'status': answer})}'")
    note(run, "kubernetes", "recmill-a", namespace="team", kind=kind)
    write_json(run / "status.json", DONE)
    assert status(run).state == expected
    assert (run.parent / "kubectl.calls").read_text() == f"get {kind} recmill-a --namespace team -o json\n"


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("job", "job-name"),
        ("jobset", "jobset.sigs.k8s.io/jobset-name"),
        ("trainjob", "jobset.sigs.k8s.io/jobset-name"),  # which its controller makes
    ],
)
def test_the_logs_of_all_pods_are_asked_for_and_cancel_removes_what_was_created(
    kind: str, label: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(run.parent, monkeypatch, "kubectl", """[ "$1" = get ] && echo '{"status": {}}' || echo "[pod] a" """)
    note(run, "kubernetes", "recmill-a", kind=kind)
    assert list(logs(run)) == ["[pod] a\n"]
    assert cancel(run, now=True) == ["recmill-a"]
    calls = [line for line in (run.parent / "kubectl.calls").read_text().splitlines() if not line.startswith("get")]
    assert calls == [
        f"logs --selector={label}=recmill-a --prefix --tail=-1 --max-log-requests=2",
        f"delete {kind}/recmill-a service/recmill-a configmap/recmill-a --ignore-not-found --grace-period=1",
    ]


def test_a_run_without_a_job_is_running_only_while_the_process_that_locked_it_lives(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(run)
    directory.write_status("running", step=3)
    with directory.locked():
        assert (status(run).state, status(run).resume) == ("running", "")
    with subprocess.Popen(["true"]) as ended:
        pass
    (run / ".lock").write_text(f"process {ended.pid} on {socket.gethostname()} since 2026-01-01T00:00:00Z")
    assert (status(run).state, run_report(run).state) == ("lost", "lost")
    directory.write_status("interrupted", step=3, reason="SIGINT")
    print_status(status(run))
    expected = f"interrupted at step 3: SIGINT\nresume: recmill train {run}/config.toml --run {run}\n"
    assert capsys.readouterr().out == expected
    assert run_report(run).state == "interrupted"


def test_a_script_that_runs_here_is_found_by_its_process_and_cancelled_by_a_signal(run: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        note(run, "mpi", str(process.pid), started=started_at(process.pid))
        assert status(run).state == "running"
        assert cancel(run) == [str(process.pid)]
        assert process.wait(60) == -signal.SIGTERM
    assert status(run).state == "lost"
    assert cancel(run) == []


def test_a_job_that_has_ended_is_removed_from_kubernetes_before_it_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps({"status": ended("Failed")})
    program(tmp_path, monkeypatch, "kubectl", f"""[ "$1" = get ] && echo '{answer}'; true""")
    for _ in range(2):
        mounts = [f"disk:{tmp_path}"]
        launch("quickstart/dlrm", tmp_path / "a", on="kubernetes", image="i", mounts=mounts, data_elsewhere=True)
    calls = (tmp_path / "kubectl.calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["create", "get", "get", "delete", "create"]


def test_cancel_now_kills_a_script_that_runs_here_and_what_it_started(run: Path) -> None:
    script = "trap '' TERM; (trap '' TERM; echo $BASHPID; sleep 60) & wait; touch went-on"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True, cwd=run) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        note(run, "torchrun", str(process.pid), started=started_at(process.pid))
        assert cancel(run, now=True) == [str(process.pid)]
        assert process.stdout.read() == ""  # its end: nobody holds the pipe any more
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: started_at(child) == 0)  # it closed the pipe a moment before
    assert not (run / "went-on").exists()
    found = status(run)
    assert (found.state, found.reason) == (
        "failed",
        "ended by cancel --now. Launch it again to resume from the last checkpoint.",
    )


def test_a_script_that_runs_on_another_machine_is_not_cancelled_from_here(run: Path) -> None:
    note_job(run / "jobs", Record("mpi", "7", "recmill-a", 1, 1, "2026-01-01T00:00:00Z", "elsewhere"))
    with pytest.raises(ResourceError, match=r"Job 7 runs on elsewhere, not here\. Run the same command there"):
        cancel(run)


@pytest.mark.parametrize(
    ("squeue", "now", "call"), [(RUNNING, False, "--signal=USR2 7"), (RUNNING, True, "7"), (QUEUED, False, "7")]
)
def test_a_slurm_job_is_asked_to_save_unless_it_waits_or_must_end_now(
    squeue: str, now: bool, call: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(run.parent, monkeypatch, "squeue", squeue)
    program(run.parent, monkeypatch, "scancel", "")
    note(run)
    assert cancel(run, now=now) == ["7"]
    assert (run.parent / "scancel.calls").read_text().strip() == call
    assert is_cancel_requested(run / "jobs", "7")


def test_logs_are_the_job_s_output_or_those_of_a_rank(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(run.parent, monkeypatch, "squeue", FORGOTTEN)
    note(run)
    with pytest.raises(ConfigError, match=r"log\.txt does not exist: nothing was logged yet"):
        list(logs(run))
    (run / "jobs" / "7.out").write_text("of the job\n")
    (run / "log.rank-1.txt").write_text("of rank 1\n")
    assert "".join(logs(run)) == "of the job\n"
    assert "".join(logs(run, rank=1)) == "of rank 1\n"
    assert "".join(logs(run, follow=True)) == "of the job\n"


def test_another_directory_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run directory"):
        status(tmp_path)


def test_an_incomplete_line_of_jobs_is_skipped(run: Path) -> None:
    note(run)
    with (run / "jobs" / "jobs.jsonl").open("a") as file:
        file.write('{"launcher": "sl')
    assert [record.id for record in read_jobs(run / "jobs")] == ["7"]


def finish(run: Path, code: int, started: int = 0, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "recmill.jobs.finish", str(run / "jobs"), "7", str(code), str(started)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})


@pytest.mark.parametrize(
    ("own", "code", "started", "state", "expected"),
    [
        (DONE, 0, 0, "done", 0),
        (STOPPED, 75, 0, "preempted", 75),
        (STOPPED, 1, 0, "preempted", 75),  # torchrun's exit code after a clean stop
        (STOPPED, 2, 2**40, "failed", 2),  # of an earlier attempt
        ({"state": "running", "step": 3}, 137, 0, "failed", 137),
        ({}, 75, 0, "preempted", 75),  # before the first step
    ],
)
def test_the_end_of_a_script_is_decided_by_the_run_s_own_status(
    own: Any, code: int, started: int, state: str, expected: int, run: Path
) -> None:
    if own:
        write_json(run / "status.json", {**own, "updated_at": "2026-01-01T00:00:00Z"})
    done = finish(run, code, started)
    assert done.returncode == expected
    assert read_job_end(run / "jobs", "7")["state"] == state
    assert f"recmill: job 7: {state} at step" in done.stderr


def test_the_first_error_of_the_ranks_is_shown(run: Path) -> None:
    (run / "jobs" / "7.errors").mkdir()
    for rank, error in ((1, ConfigError("the cause.")), (0, RuntimeError("a consequence"))):
        report_failure(run / "jobs" / "7.errors", rank, error)
    assert "failed at step 0: the cause." in finish(run, 2).stderr
    assert read_job_end(run / "jobs", "7")["reason"] == "the cause."


@pytest.mark.parametrize(
    ("squeue", "restarts", "is_cancelled", "is_requeued"),
    [
        ("echo RUNNING", "3", False, True),
        ("echo RUNNING", "20", False, False),
        ("echo RUNNING", "3", True, False),
        ("echo COMPLETING", "3", False, False),  # somebody used scancel
    ],
)
def test_a_preempted_slurm_job_is_requeued_unless_somebody_cancelled_it(
    squeue: str, restarts: str, is_cancelled: bool, is_requeued: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(run.parent, monkeypatch, "squeue", squeue)
    program(run.parent, monkeypatch, "scontrol", "")
    note(run)
    if is_cancelled:
        (run / "jobs" / "7.cancelled").touch()
    assert finish(run, 75, SLURM_RESTART_COUNT=restarts).returncode == 75
    assert (run.parent / "scontrol.calls").exists() == is_requeued


def test_a_requeue_that_slurm_refuses_is_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(run.parent, monkeypatch, "squeue", "echo RUNNING")
    program(run.parent, monkeypatch, "scontrol", "echo 'Requested operation is presently disabled' >&2; exit 1")
    note(run)
    done = finish(run, 75)
    assert "scontrol requeue: Requested operation is presently disabled: launch again to resume" in done.stderr
    assert done.returncode == 75
