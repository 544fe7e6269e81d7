"""Our kernels against torch's and FBGEMM's, and what happens where they cannot be compiled."""

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from recmill.kernels import native as native_module
from recmill.kernels.functions import fits
from recmill.kernels.native import native
from recmill.nn.interactions import DotInteraction
from recmill.nn.mlp import mlp
from recmill.tables.native_lookup import replace_lookup


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


ROWS = [1, 7, 5000, 3]
OPTIMIZERS = [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]


def tables(optimizer: EmbOptimType, dim: int = 20) -> SplitTableBatchedEmbeddingBagsCodegen:
    made = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in ROWS],
        optimizer=optimizer,
        learning_rate=0.1,
        eps=1e-6,
    )
    torch.manual_seed(3)
    made.weights_host.data.normal_()
    return made


def lookups(batch: int, step: int) -> tuple[Tensor, Tensor]:
    """Bags of 0 to 3 ids; in small tables nearly all are there several times."""
    torch.manual_seed(100 + step)
    lengths = torch.randint(0, 4, (len(ROWS) * batch,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    counts = lengths.view(len(ROWS), batch).sum(1).tolist()
    return torch.cat([torch.randint(0, rows, (n,)) for rows, n in zip(ROWS, counts, strict=True)]), offsets


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("threads", [1, 2])
def test_tables_learn_what_fbgemms_do(library: ctypes.CDLL, optimizer: EmbOptimType, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        theirs, ours = tables(optimizer), tables(optimizer)
        replace_lookup(ours, library)
        for step in range(4):
            ids, offsets = lookups(batch=33, step=step)
            for group in (theirs, ours):
                group.set_learning_rate(0.1 / (step + 1))
            expected, found = theirs(ids, offsets), ours(ids, offsets)
            torch.testing.assert_close(found, expected)
            torch.manual_seed(step)
            upstream = torch.randn(*expected.shape[::-1]).t()
            expected.backward(upstream)
            found.backward(upstream)
        torch.testing.assert_close(ours.weights_host, theirs.weights_host)
        if optimizer != EmbOptimType.EXACT_SGD:
            torch.testing.assert_close(ours.momentum1_host, theirs.momentum1_host)
    finally:
        torch.set_num_threads(before)


def test_more_threads_change_no_bit_of_the_tables(library: ctypes.CDLL) -> None:
    def trained(threads: int) -> Tensor:
        torch.set_num_threads(threads)
        group = tables(EmbOptimType.EXACT_ADAGRAD)
        replace_lookup(group, library)
        ids, offsets = lookups(batch=500, step=0)
        out = group(ids, offsets)
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
        return group.weights_host.detach().clone()

    before = torch.get_num_threads()
    try:
        assert torch.equal(trained(1), trained(3))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [-1, 7, 2**40])
def test_an_id_outside_its_table_is_an_error(library: ctypes.CDLL, bad: int) -> None:
    group = tables(EmbOptimType.EXACT_SGD)
    replace_lookup(group, library)
    ids, offsets = torch.tensor([0, bad, 4, 2]), torch.arange(5)
    with pytest.raises(IndexError, match=f"id {bad} at place 1 of 4"):
        group(ids, offsets)


def test_what_ours_cannot_do_stays_with_fbgemm(library: ctypes.CDLL) -> None:
    specs = [(5, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for dim in (8, 16)]
    group = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=EmbOptimType.EXACT_SGD)
    replace_lookup(group, library)
    assert "forward" not in vars(group)


def test_without_a_compiler_it_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    native_module._compiled_or_none.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert native_module.native() is None
        assert native_module.native() is None
    (record,) = caplog.records
    assert "no C++ compiler (CXX, g++, c++, clang++)" in record.message
    assert "twice as long" in record.message


def test_a_compiler_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken-g++"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "cannot find -lgomp" >&2; exit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    native_module._compiled_or_none.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert native_module.native() is None
    assert "cannot find -lgomp" in caplog.text


@pytest.fixture
def copying_compiler(library: ctypes.CDLL, tmp_path: Path) -> Path:
    """Copies the library that the real compiler made: the last argument says where to."""
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\nfor last; do :; done\ncp {library._name} "$last"\n'
    )
    compiler.chmod(0o755)
    return compiler


def test_kernels_that_this_cpu_cannot_run_are_refused_and_not_tried_again(
    copying_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(copying_compiler))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RECMILL_FAIL", "probe.kernel:sigill")
    for _ in range(2):
        native_module._compiled_or_none.cache_clear()
        caplog.clear()
        assert native() is None
        assert (
            "cannot be used here: a trial run was killed by SIGILL: this CPU, or its hypervisor, lacks" in caplog.text
        )
        assert "Set train.kernels=torch" in caplog.text
        monkeypatch.delenv("RECMILL_FAIL", raising=False)  # it would work now, but what is known is not tried again
    (kept,) = (tmp_path / ".cache" / "recmill").iterdir()
    assert kept.suffix == ".txt"


def test_kernels_that_were_run_once_are_kept(
    copying_compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(copying_compiler))
    monkeypatch.setenv("HOME", str(tmp_path))
    native_module._compiled_or_none.cache_clear()
    assert native() is not None
    monkeypatch.setenv("RECMILL_FAIL", "probe.kernel:sigill")
    native_module._compiled_or_none.cache_clear()
    assert native() is not None


def test_processes_that_compile_at_once_all_get_it(tmp_path: Path) -> None:
    code = "from recmill.kernels.native import native; assert native() is not None"
    environment = {**os.environ, "HOME": str(tmp_path)}
    workers = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [worker.wait(200) for worker in workers] == [0, 0]
    (kept,) = (tmp_path / ".cache" / "recmill").iterdir()
    assert kept.suffix == ".so"


def test_a_table_without_rows_and_bags_without_ids_are_no_trouble(library: ctypes.CDLL) -> None:
    """A rank may hold none of a table's rows."""
    specs = [(rows, 4, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in (0, 5)]
    group = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=EmbOptimType.EXACT_SGD, learning_rate=1.0)
    group.weights_host.data.fill_(2.0)
    replace_lookup(group, library)
    out = group(torch.tensor([3, 3]), torch.tensor([0, 0, 0, 0, 2]))
    assert out.tolist() == [[0.0] * 8, [0.0] * 4 + [4.0] * 4]
    out.sum().backward()
    assert group.weights_host.view(5, 4)[:, 0].tolist() == [2.0, 2.0, 2.0, 0.0, 2.0]
