from pathlib import Path

import pytest

from recmill.hardware.memory import _cgroups


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/", {"memory.max": "max"}, []),
        ("0::/", {"memory.max": "4000"}, [(4000, 0)]),
        (
            "0::/job/step",
            {"job/memory.max": "3000", "job/step/memory.max": "max", "other/memory.max": "1"},
            [(3000, 0)],
        ),
        ("4:cpu:/x\n5:memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": "2000"}, [(2000, 0)]),
        (
            "0::/job",
            {"job/memory.max": "900", "job/memory.current": "700", "job/memory.stat": "anon 500\ninactive_file 150"},
            [(900, 550)],
        ),
        ("0::/gone", {}, []),
    ],
)
def test_limits_of_control_groups_and_what_is_used_of_them_are_found(
    tmp_path: Path, membership: str, files: dict[str, str], expected: list[tuple[int, int]]
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership + "\n")
    for name, text in files.items():
        (tmp_path / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / name).write_text(text + "\n")
    assert _cgroups(tmp_path) == expected


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert _cgroups(tmp_path) == []
