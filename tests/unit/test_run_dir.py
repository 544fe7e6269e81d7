import os
import subprocess
import sys
from pathlib import Path

from recmill.observe.run_dir import RunDirectory


def test_the_lock_of_a_killed_owner_stops_nobody(tmp_path: Path) -> None:
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
