"""Compiled functions."""

import logging

import pytest

from recmill.datasets import compiled


def test_the_first_function_that_is_compiled_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process others may have been compiled already."""
    monkeypatch.setattr(compiled.compilation_note, "is_logged", False)
    functions = [lambda x: x + 1, lambda x: x + 2]
    for function in functions:
        function.__module__ = "recmill.tests"
    first, second = (compiled.njit(function) for function in functions)
    with caplog.at_level(logging.INFO):
        assert (first(1), first(2), second(1)) == (2, 3, 3)
    assert caplog.messages == ["compiling the parser"]
