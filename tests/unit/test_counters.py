"""Counters of this process, and of a machine that is described by files."""

import mmap
import os
from pathlib import Path

from recmill.observe.counters import counters, rss_bytes


def test_counters_grow_with_what_this_process_does(tmp_path: Path) -> None:
    before = counters()
    with mmap.mmap(-1, 64 << 20) as block:
        block.write(b"x" * (64 << 20))
        assert rss_bytes() > before["rss"] + (32 << 20)
        with (tmp_path / "file").open("wb") as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
        after = counters()
    assert after["minor_faults"] >= before["minor_faults"]
    assert after["peak_rss"] >= after["rss"] - (1 << 20)
    assert after["cpu_s"] >= before["cpu_s"]


def test_pressure_and_throttling_are_read_from_either_version_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/pressure").mkdir()
    (tmp_path / "proc/pressure/cpu").write_text("some avg10=1.00 avg60=2.00 avg300=3.00 total=2500000\nfull total=7\n")
    for version, line, stat in (
        (1, "4:cpu,cpuacct:/job", ("cpu,cpuacct/job", "nr_throttled 3\nthrottled_time 1500000000\n")),
        (2, "0::/job", ("job", "usage_usec 5\nthrottled_usec 1500000\n")),
    ):
        (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
        folder = tmp_path / "sys/fs/cgroup" / stat[0]
        folder.mkdir(parents=True)
        (folder / "cpu.stat").write_text(stat[1])
        found = counters(tmp_path)
        assert (found["cpu_pressure_s"], found["throttled_s"]) == (2.5, 1.5), version


def test_what_a_machine_does_not_count_is_left_out(tmp_path: Path) -> None:
    assert not counters(tmp_path).keys() & {"read_bytes", "cpu_pressure_s", "throttled_s", "gpus"}
