import errno
import logging
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from recmill.kernels import library as module
from recmill.kernels.library import KernelLibrary, load_library


def test_a_missing_compiler_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert load_as_new_process() is None
        assert load_library() is None
    (record,) = caplog.records
    assert "no C++ compiler (CXX, g++, c++, clang++)" in record.message
    assert "twice as long" in record.message


def test_without_a_compiler_texts_are_parsed_by_polars(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    module._load_parser_or_warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert module.load_parser() is None
        assert module.load_parser() is None
    (record,) = caplog.records
    assert "no C++ compiler (CXX, g++, c++, clang++). Texts are parsed by Polars" in record.message


def test_the_output_of_a_failing_compiler_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    use_compiler('echo "cannot find -lgomp" >&2; exit 1', tmp_path, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert load_as_new_process() is None
    assert "cannot find -lgomp" in caplog.text


def use_compiler(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a shell script the C++ compiler, and `folder` the home directory, which has the cache."""
    compiler = folder / "g++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HOME", str(folder))
    return compiler


def load_as_new_process() -> KernelLibrary | None:
    module._load_or_warn.cache_clear()
    return load_library()


@pytest.fixture
def copying_compiler(library: KernelLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a compiler that copies the library of the real one to the path in its last argument."""
    script = f'echo compiled >> {tmp_path}/calls\nfor last; do :; done\ncp {library.path} "$last"'
    use_compiler(script, tmp_path, monkeypatch)


def test_kernels_that_this_cpu_cannot_run_are_refused_and_not_tried_again(
    copying_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RECMILL_FAIL", "probe.kernel:sigill")
    for _ in range(2):
        caplog.clear()
        assert load_as_new_process() is None
        assert (
            "cannot be used here: a trial run was killed by SIGILL: this CPU, or its hypervisor, lacks" in caplog.text
        )
        assert "Set train.kernels=torch" in caplog.text
        monkeypatch.delenv("RECMILL_FAIL", raising=False)  # it would work now, but the refusal is cached
    assert num_compilations(tmp_path) == 1


def test_kernels_that_passed_their_trial_are_not_tried_again(
    copying_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_as_new_process() is not None
    monkeypatch.setenv("RECMILL_FAIL", "probe.kernel:sigill")
    assert load_as_new_process() is not None


def test_a_trial_that_fails_is_not_blamed_on_the_compiler(
    copying_compiler: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RECMILL_FAIL", "probe.kernel:raise")
    assert load_as_new_process() is None
    assert "a trial run failed: RuntimeError: requested by RECMILL_FAIL at probe.kernel. Training" in caplog.text
    assert "Traceback" not in caplog.text


def num_compilations(home: Path) -> int:
    """Return how often `copying_compiler` was called."""
    return len((home / "calls").read_text(encoding="utf-8").splitlines())


def test_one_of_several_processes_compiles_and_the_others_use_its_library(
    copying_compiler: None, tmp_path: Path
) -> None:
    code = "from recmill.kernels.library import load_library; assert load_library() is not None"
    workers = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [worker.wait(200) for worker in workers] == [0, 0]
    assert num_compilations(tmp_path) == 1


@pytest.mark.parametrize("suffix", [".so", ".json"])
@pytest.mark.parametrize("damage", ["truncated", "zeroed", "random", "one bit", "missing"])
def test_a_corrupt_cache_is_compiled_again(suffix: str, damage: str, copying_compiler: None, tmp_path: Path) -> None:
    """A truncated library would kill this process with SIGBUS if it were loaded."""
    library = load_as_new_process()
    assert library is not None
    file = library.path.with_suffix(suffix)
    good = file.read_bytes()
    half = len(good) // 2
    file.unlink()  # this process has mapped the library
    corrupt = {
        "truncated": good[:half],
        "zeroed": bytes(len(good)),
        "random": random.Random(0).randbytes(len(good)),
        "one bit": good[:half] + bytes([good[half] ^ 1]) + good[half + 1 :],
    }
    if damage in corrupt:
        file.write_bytes(corrupt[damage])
    assert load_as_new_process() is not None
    assert file.read_bytes() == good
    assert num_compilations(tmp_path) == 2


@pytest.mark.parametrize("note", ["[1]", "{}", "7", '{"fault": 1}', "[" * 100_000])
def test_a_note_that_we_did_not_write_is_ignored(note: str, tmp_path: Path) -> None:
    (tmp_path / "kernels.so").touch()
    (tmp_path / "kernels.json").write_text(note)
    assert module._read_note(tmp_path / "kernels.so") is None


def test_a_compiler_that_hangs_is_announced_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    endless = use_compiler("sleep 1000", tmp_path, monkeypatch)
    monkeypatch.setattr(module, "_MAX_SECONDS", 0.5)
    with caplog.at_level(logging.INFO):
        assert load_as_new_process() is None
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert caplog.messages[0] == f"compiling CPU kernels with {endless}; this takes seconds, once per machine"
    assert f"{endless} does not finish within 0 s. Training works." in caplog.messages[1]
    assert "Set CXX to a compiler that works, or train.kernels=torch" in caplog.messages[1]


def test_waiting_for_another_process_that_compiles_has_a_limit(tmp_path: Path) -> None:
    lock = tmp_path / "kernels.lock"
    with (
        module._lock(lock, time.monotonic() + 60),
        pytest.raises(TimeoutError),
        module._lock(lock, time.monotonic() + 0.2),
    ):
        raise AssertionError("both hold the lock")


def test_a_cache_that_cannot_be_written_is_named(
    copying_compiler: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/home/ann/.cache")

    monkeypatch.setattr(Path, "touch", full)
    assert load_as_new_process() is None
    assert "/home/ann/.cache: No space left on device. The disk is full" in caplog.text
    assert "Install g++" not in caplog.text


def test_without_any_folder_to_compile_in_training_works(
    copying_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert load_as_new_process() is None
    assert "Training works." in caplog.text
    assert "Check the disk and the permissions of TMPDIR." in caplog.text


def test_without_a_cache_folder_nothing_is_left_behind(
    copying_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    library = load_as_new_process()
    assert library is not None
    assert not library.path.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"calls", "g++"}
