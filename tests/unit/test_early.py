"""A command in its first moments, and with closed standard files."""

import resource
import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75), ("SIGUSR1", 75)])
def test_a_signal_while_modules_are_imported_ends_training_with_one_line(name: str, code: int) -> None:
    """The process sends it to itself, when it imports one of the first modules of the command line."""
    script = (
        "import os, runpy, signal, sys\n"
        "class Sender:\n"
        "    def find_spec(self, module, *_):\n"
        f"        module == 'click.core' and os.kill(os.getpid(), signal.{name})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it\n"
        "sys.meta_path.insert(0, Sender())\n"
        "sys.argv = ['recmill', 'train', 'none.toml', '--run', 'r']\n"
        "runpy.run_module('recmill', run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    kind = "interrupted" if name == "SIGINT" else f"preempted: ended at once by {name}"
    assert done.stderr == f"recmill: {kind}; what was committed before is complete\n"
    assert done.returncode == code


def test_other_commands_clean_up_when_they_are_interrupted() -> None:
    code = (
        "import signal, sys\n"
        "from recmill import cli\n"
        "from recmill.launch import early\n"
        "early.begin()\n"
        "sys.argv = ['recmill', 'results', 'none']\n"
        "print(cli._run(sys.argv[1:]), signal.getsignal(2).__name__, signal.getsignal(15).name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "4 default_int_handler SIG_DFL\n", done.stderr


@pytest.mark.parametrize(("code", "expected"), [(75, 75), (130, 130), (0, -signal.SIGTERM)])
def test_a_second_signal_while_python_ends_does_not_change_the_exit_code_of_a_stop(code: int, expected: int) -> None:
    text = (
        "import os\n"
        "from recmill.launch import early\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, own=os.getpid()): kill(own, 15)\n"
        "last = Last()\n"
        "early.begin()\n"
        f"early.end_with({code})\n"
    )
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == expected


@pytest.mark.parametrize(("code", "expected"), [(75, 75), (130, 130), (0, 75)])
def test_nor_does_one_while_a_command_leaves_without_python_s_end(code: int, expected: int) -> None:
    text = (
        "import logging, os\n"
        "from recmill.launch import early\n"
        "class Last(logging.Handler):\n"
        "    def close(self): os.kill(os.getpid(), 15)\n"
        "last = Last()\n"
        "early.begin()\n"
        f"early.leave({code})\n"
    )
    assert subprocess.run([sys.executable, "-c", text], check=False, capture_output=True).returncode == expected


def run_with(limits: dict[int, int], *arguments: str) -> "subprocess.CompletedProcess[str]":
    def limit() -> None:
        for which, number in limits.items():
            resource.setrlimit(which, (number, number))

    command = [sys.executable, "-m", "recmill", *arguments]
    return subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("command", "which", "limit", "message"),
    [
        ("results", resource.RLIMIT_AS, 100_000_000, "100,000,000 bytes of address space, and this needs 500,000,000"),
        ("evaluate", resource.RLIMIT_AS, 1_999_000_000, "1,999,000,000 bytes of address space, and this needs 2,000,"),
        ("results", resource.RLIMIT_DATA, 200_000_000, "200,000,000 bytes of data, and this needs 300,000,000"),
        ("evaluate", resource.RLIMIT_DATA, 400_000_000, "400,000,000 bytes of data, and this needs 600,000,000"),
        ("results", resource.RLIMIT_NOFILE, 6, "6 open files, and this needs 32. Raise the limit (see: ulimit -n)."),
    ],
)
def test_limits_with_which_libraries_abort_are_refused_at_once(
    command: str, which: int, limit: int, message: str
) -> None:
    done = run_with({which: limit}, command, "none")
    assert done.returncode == 5, done.stderr
    assert done.stderr.startswith(f"recmill: resource error: a process may have {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("results none", 4, "none"),
        ("--debug checkpoint list none", 4, "none"),
        ("adopt none", 3, "none: no such directory"),
        ("split --input none --output out", 3, "none: no such file"),
        ("download movielens --variant none --output out", 2, "'none'"),
    ],
)
def test_commands_without_large_libraries_work_with_less(command: str, code: int, message: str) -> None:
    """They get as far as their own errors."""
    done = run_with({resource.RLIMIT_AS: 500_000_000, resource.RLIMIT_DATA: 300_000_000}, *command.split())
    assert done.returncode == code, done.stderr
    assert message in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_works_with_closed_standard_files(closed: str) -> None:
    """A file that is opened later must not get the number of a standard file."""
    code = (
        "import os, sys\n"
        "from recmill.launch.early import begin\n"
        "begin()\n"
        "print('x', flush=True)\n"
        "print('y', file=sys.stderr)\n"
        "sys.exit(0 if os.open('/dev/null', 0) > 2 and os.get_inheritable(1) else 9)\n"
    )
    shell = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "is_torn_down"), [("--debug train", False), ("evaluate", False), ("doctor", True)]
)
def test_commands_that_start_a_worker_end_without_tearing_libraries_down(arguments: str, is_torn_down: bool) -> None:
    code = (
        "import atexit, sys; from recmill import cli; atexit.register(print, 'torn down');"
        f"sys.argv[1:] = {[*arguments.split(), '--help']}; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: recmill" in done.stdout
    assert ("torn down" in done.stdout) == is_torn_down
