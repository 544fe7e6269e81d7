import pytest

from recmill.commands import doctor


def fake_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """What pip would say; nothing is uninstalled for a test."""
    monkeypatch.setattr(doctor, "installed_version", lambda package: versions.get(package.replace("-", "_")))
    monkeypatch.setattr(doctor, "_real_operations", lambda: [])


def problems(checks: list[doctor.Check]) -> dict[str, str]:
    return {check.name: check.remedy for check in checks if not check.is_good}


def test_an_unmatched_trio_is_told_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_libraries_that_do_not_fit_together_are_found_by_a_real_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_FBGEMM_PROBE", "raise ImportError('undefined symbol')")
    (check,) = doctor._real_operations()
    assert not check.is_good
    assert "undefined symbol" in check.found
    assert check.remedy == doctor.mend()
