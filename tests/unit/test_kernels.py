"""Our kernels against torch's, and what happens where they cannot be compiled."""

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recmill.kernels import native as native_module
from recmill.kernels.functions import fits
from recmill.kernels.native import native
from recmill.nn.interactions import DotInteraction
from recmill.nn.mlp import mlp


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    yield
    native_module._compiled_or_none.cache_clear()


@pytest.fixture
def library() -> ctypes.CDLL:
    found = native()
    assert found is not None, "the tests need a C++ compiler"
    return found


def gradients(module: nn.Module, inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """By an upstream gradient that does not lie straight in memory."""
    torch.manual_seed(5)
    out = module(*inputs)
    weights = [weight for weight in [*inputs, *module.parameters()] if weight.requires_grad]
    return out, list(torch.autograd.grad(out, weights, torch.randn(*out.shape[::-1]).t()))


def assert_same(module: nn.Module, inputs: list[Tensor], library: ctypes.CDLL) -> None:
    expected = gradients(module, inputs)
    module.native = library  # type: ignore[assignment]
    torch.testing.assert_close(gradients(module, inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("needs_input_gradient", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("sizes", [[8], [70, 33, 4]])
def test_an_mlp_is_that_of_torch(library: ctypes.CDLL, sizes: list[int], rows: int, needs_input_gradient: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(rows, 13, requires_grad=needs_input_gradient)
    assert_same(mlp(13, sizes), [x], library)


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("padding", [1, 16])
@pytest.mark.parametrize(("vectors", "dim"), [(2, 16), (4, 32), (16, 16), (17, 48), (27, 128), (40, 16), (70, 16)])
def test_pair_products_are_those_of_torch(
    library: ctypes.CDLL, vectors: int, dim: int, padding: int, itself: bool
) -> None:
    torch.manual_seed(2)
    inputs = [torch.randn(9, dim, requires_grad=True), torch.randn(9, (vectors - 1) * dim, requires_grad=True)]
    assert_same(DotInteraction(vectors, dim, itself, padding), inputs, library)


def test_nan_stays_visible(library: ctypes.CDLL) -> None:
    layers = mlp(4, [3, 2])
    layers.native = library
    next(layers.parameters()).data[1] = torch.nan
    out = layers(torch.randn(2, 4))
    assert out.isnan().any()
    pairs = DotInteraction(3, 16)
    pairs.native = library
    dense = torch.randn(2, 16)
    dense[1, 0] = torch.inf
    found = pairs(dense, torch.zeros(2, 32))
    assert found[1].isnan().any()
    assert not found[0].isnan().any()


def test_no_kernel_for_what_it_cannot_do(library: ctypes.CDLL) -> None:
    assert fits(library, torch.zeros(2))
    assert not fits(None, torch.zeros(2))
    assert not fits(library, torch.zeros(2, dtype=torch.float64))
    assert not fits(library, torch.zeros(2, device="meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(library, torch.zeros(2))


def test_without_a_compiler_it_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(native_module, "_COMPILERS", ("no-such-compiler",))
    native_module._compiled_or_none.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert native_module.native() is None
        assert native_module.native() is None
    (record,) = caplog.records
    assert "no C++ compiler (no-such-compiler)" in record.message
    assert "twice as long" in record.message


def test_a_compiler_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "cannot find -lgomp" >&2; exit 1\n')
    broken.chmod(0o755)
    monkeypatch.setattr(native_module, "_COMPILERS", (str(broken),))
    native_module._compiled_or_none.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert native_module.native() is None
    assert "cannot find -lgomp" in caplog.text


def test_processes_that_compile_at_once_all_get_it(tmp_path: Path) -> None:
    code = "from recmill.kernels.native import native; assert native() is not None"
    environment = {**os.environ, "HOME": str(tmp_path)}
    workers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [worker.wait(200) for worker in workers] == [0, 0]
    (kept,) = (tmp_path / ".cache" / "recmill").iterdir()
    assert kept.suffix == ".so"
