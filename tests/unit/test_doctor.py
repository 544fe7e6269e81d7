import re
from pathlib import Path

import pytest

from recmill.commands import doctor
from recmill.errors import ConfigError
from recmill.hardware.precision import Finding
from recmill.tables.stores import disk_probe


def fake_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Pretend that pip has installed these versions."""
    monkeypatch.setattr(doctor, "installed_version", lambda package: versions.get(package.replace("-", "_")))
    monkeypatch.setattr(doctor, "_real_operations", lambda: [])


def problems(checks: list[doctor.Check]) -> dict[str, str]:
    return {check.name: check.remedy for check in checks if not check.is_good}


def test_versions_that_do_not_match_are_reported_with_the_command_that_fixes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_versions(monkeypatch, torch="2.14.0", torchrec="1.8.0", fbgemm_gpu_cpu="1.8.0")
    checks = doctor.doctor()
    assert not doctor.would_work(checks)
    assert "pip install torch==2.13.0" in problems(checks)["torch"]


def test_both_fbgemms_at_once_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_versions(monkeypatch, torch="2.13.0", torchrec="1.8.0", fbgemm_gpu_cpu="1.8.0", fbgemm_gpu="1.8.0")
    assert problems(doctor.doctor())["fbgemm"].startswith("pip uninstall -y fbgemm-gpu")


def test_nothing_installed_is_a_problem_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_versions(monkeypatch)
    assert set(problems(doctor.doctor())) == {"torch", "torchrec", "fbgemm-gpu-cpu"}


def test_a_missing_compiler_does_not_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_versions(monkeypatch, torch="2.13.0+cpu", torchrec="1.8.0", fbgemm_gpu_cpu="1.8.0")
    monkeypatch.setattr("shutil.which", lambda name: None)
    checks = doctor.doctor()
    assert problems(checks) == {"C++ compiler": "apt-get install g++"}
    assert doctor.would_work(checks)


def test_libraries_that_do_not_match_are_found_by_a_real_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_FBGEMM_PROBE", "raise ImportError('undefined symbol')")
    (check,) = doctor._real_operations()
    assert not check.is_good
    assert "undefined symbol" in check.found
    assert check.remedy == doctor.fix_command()


def test_an_operation_that_kills_its_process_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_FBGEMM_PROBE", "import os; os.kill(os.getpid(), 4)")
    (check,) = doctor._real_operations()
    assert (check.found, check.is_good) == ("killed by SIGILL", False)
    assert not doctor.would_work([check])


def test_a_compiler_that_fails_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho cannot find -lgomp >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_precision", lambda dtype: doctor.Check(dtype, ""))
    checks = doctor._real_operations()
    assert [check.name for check in checks if not check.is_good] == ["CPU kernels"]
    assert doctor.would_work(checks)
    assert f"{compiler} fails: cannot find -lgomp" in capfd.readouterr().err


def test_a_missing_compiler_costs_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    check = doctor._compiler()
    assert (
        "Recmill's CPU kernels cannot be compiled. Without them, steps of click models take 1.2 to 1.3 times"
        in check.found
    )


@pytest.mark.parametrize(
    ("finding", "is_good", "found"),
    [
        (
            Finding("bfloat16", 1.84),
            True,
            "measured 1.84 times float32's speed on this CPU: train.precision can use it",
        ),
        (Finding("bfloat16", 0.6), True, "measured 0.60 of float32's speed on this CPU: training stays in float32"),
        (
            Finding("bfloat16", 0.6, "AVX512_CORE_BF16", "is killed by SIGILL"),
            True,
            "measured 0.60 of float32's speed on this CPU with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, without which "
            "a product is killed by SIGILL: training stays in float32",
        ),
        (
            Finding("bfloat16", problem="is killed by SIGILL"),
            False,
            "a product is killed by SIGILL on this CPU: training stays in float32",
        ),
    ],
)
def test_each_dtype_has_a_row_with_what_running_it_showed(
    finding: Finding, is_good: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe", lambda dtype, threads: finding)
    check = doctor._precision("bfloat16")
    assert (check.name, check.found, check.is_good) == ("bfloat16 on CPU", found, is_good)
    assert not check.is_needed
    assert "train.precision = 'float32'" in check.remedy


def test_without_gpus_there_is_one_row_about_them() -> None:
    assert doctor._gpus([], "") == [doctor.Check("GPU", "none: training runs on the CPU", is_needed=False)]


def test_gpus_are_counted_and_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for what FBGEMM and NCCL do on GPUs."""
    working = {
        "FBGEMM on GPU": "print('works on 3 GPU(s)')",
        "NCCL all-to-all": "raise RuntimeError('unhandled system error')",
    }
    monkeypatch.setattr(doctor, "_GPU_PROBES", working)
    checks = doctor._gpus(["A100", "A100", "H100"], "cuda")
    found = {check.name: (check.found, check.is_good) for check in checks}
    assert found == {
        "GPU": ("2 x A100, 1 x H100: at most 3 process(es) on this machine", True),
        "FBGEMM on GPU": ("works on 3 GPU(s)", True),
        "NCCL all-to-all": ("RuntimeError: unhandled system error", False),
    }
    assert not doctor.would_work(checks)


def test_a_gpu_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_MAX_SECONDS", 0.5)
    check = doctor._probed("NCCL all-to-all", "import signal; signal.pause()")
    assert (check.found, check.is_good) == ("gives no result within 0.5 s", False)


def test_gpus_without_kernels_for_them_are_no_reason_to_stop() -> None:
    checks = doctor._gpus(["A100"], "cpu")
    assert doctor.would_work(checks)
    assert problems(checks) == {"FBGEMM on GPU": "make setup SETUP=cuda"}


def test_the_probes_of_gpus_run_as_far_as_a_machine_without_one_allows() -> None:
    """Up to the loop over GPUs, and up to processes that find none."""
    assert doctor._probed("FBGEMM on GPU", doctor._GPU_PROBES["FBGEMM on GPU"]).found.startswith("works on ")
    two_gpus = "import torch; torch.cuda.device_count = lambda: 2\n"
    found = doctor._probed("NCCL all-to-all", two_gpus + doctor._GPU_PROBES["NCCL all-to-all"]).found
    assert "torch sees no GPU here" in found or "exchanged values among 2 GPU(s)" in found


def test_a_disk_is_measured_for_cached_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_probe, "_FILE_BYTES", 8 << 20)
    monkeypatch.setattr(disk_probe, "_SECONDS", 0.02)
    found = {check.name: check.found for check in doctor.check_store(str(tmp_path))}
    assert re.fullmatch(r"\w+, [\d,.]+ GB free", found["file system"])
    assert {"O_DIRECT", "io_uring", "threads, depth 1", "threads, depth 64"} <= found.keys()
    assert re.fullmatch(r"[\d,]+ reads/s, [\d.]+ us of CPU each", found["threads, depth 64"])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"--store: .*/missing does not exist"):
        doctor.check_store(str(tmp_path / "missing"))
