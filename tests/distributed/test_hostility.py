"""A few hostile trials of each kind; `make hostile` makes as many as one likes."""

import json
import os
import subprocess
import sys

import pytest

from ..conftest import REPO


@pytest.mark.timeout(900)  # a minute where cores are free
def test_bad_input_corrupt_files_and_odd_environments_end_in_one_message() -> None:
    command = [sys.executable, "-m", "tests.hostile", "--trials", "60", "--seed", "8"]
    tester = subprocess.run(command, cwd=REPO, env=os.environ, capture_output=True, text=True)
    counts = json.loads(tester.stdout.splitlines()[-1])
    assert (counts["bug"], counts["weak"]) == (0, 0), tester.stdout
    assert len(counts["kinds"]) == 6
    assert counts["ok"] >= 55
    assert tester.returncode == 0
