from pathlib import Path

import pytest

from recmill.hardware.cpu import cache_folder, cxx_compiler, is_amd_with_avx512, num_cores, threads_per_process


def make_program(path: Path) -> str:
    path.touch(mode=0o755)
    return str(path)


def test_the_compiler_is_that_of_cxx_or_the_first_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert cxx_compiler() is None
    clang = make_program(tmp_path / "clang++")
    assert cxx_compiler() == clang
    own = make_program(tmp_path / "own-c++")
    monkeypatch.setenv("CXX", "own-c++")
    assert cxx_compiler() == own
    monkeypatch.setenv("CXX", own)
    assert cxx_compiler() == own
    monkeypatch.setenv("CXX", "not-there")
    assert cxx_compiler() == clang


@pytest.mark.parametrize(
    ("procs", "chosen", "expected"),
    [(1, "", 4), (2, "", 2), (8, "", 1), (2, "3", 3), (2, "3,1", 3), (2, "many", 2), (2, "²", 2)],
)
def test_processes_share_the_cores_unless_omp_num_threads_says_otherwise(
    procs: int, chosen: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 4, 5})
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    assert num_cores() == 4
    assert threads_per_process(procs) == expected


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("AuthenticAMD", "avx2 avx512f avx512dq", True),
        ("AuthenticAMD", "avx2 avx512f", True),
        ("AuthenticAMD", "avx2 fma", False),
        ("GenuineIntel", "avx2 avx512f avx512dq", False),
    ],
)
def test_amds_cpus_with_avx512_are_recognized(
    vendor: str, flags: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = [f"vendor_id\t: {vendor}", "model name\t: a CPU", f"flags\t\t: fpu {flags}", ""]
    monkeypatch.setattr("recmill.hardware.cpu._cpuinfo", lambda: core * 2)
    assert is_amd_with_avx512() == expected


def test_the_cache_is_private_and_none_where_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "recmill"
    assert (tmp_path / ".cache" / "recmill").stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("HOME", "/dev/null")
    assert cache_folder() is None
