"""The kernels of encoder.cpp and catalogue.cpp against torch."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recmill.kernels.layers import use_kernels
from recmill.kernels.library import KernelLibrary
from recmill.nn.cross_entropy import Seen, cross_entropy_sum
from recmill.nn.dropout import RowDropout
from recmill.nn.rows import Rows
from recmill.nn.transformer import Attention, EncoderBlock, TransformerShape


def rows_of(lengths: list[int], query_share: float = 1.0) -> Rows:
    """Some rows may have no queries."""
    generator = torch.Generator().manual_seed(len(lengths))
    num_tokens = sum(lengths)
    is_query = torch.rand(num_tokens, generator=generator) < query_share
    is_query[-1] = True
    queries = is_query.nonzero().squeeze(1)
    keys = torch.randint(-(2**63), 2**63 - 1, (len(lengths),), generator=generator)
    return Rows(torch.tensor(lengths), max(lengths), queries, keys, num_tokens)


def block_of(dim: int, heads: int, attention: Attention) -> EncoderBlock:
    torch.manual_seed(1)
    block = EncoderBlock(dim, TransformerShape(200, 1, heads, 0.3, attention), site=5)
    with torch.no_grad():
        for parameter in block.parameters():  # norms scale and shift, attention is not uniform
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return block


def results(block: EncoderBlock, x: Tensor, rows: Rows) -> list[Tensor]:
    """Return the output and all gradients; the upstream gradient is not contiguous."""
    x = x.clone().requires_grad_()
    out = block(x, rows, outputs="queries")
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape[::-1]).t()
    return [out.detach(), *torch.autograd.grad(out, [x, *block.parameters()], upstream)]


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
@pytest.mark.parametrize("query_share", [1.0, 0.2])
@pytest.mark.parametrize(("dim", "heads"), [(16, 1), (48, 3), (64, 2), (160, 5)])
@pytest.mark.parametrize("lengths", [[1], [17], [5, 200, 1, 64, 3]])
def test_a_block_equals_torchs(
    library: KernelLibrary, lengths: list[int], dim: int, heads: int, query_share: float, attention: Attention
) -> None:
    block, rows, x = block_of(dim, heads, attention), rows_of(lengths, query_share), torch.randn(sum(lengths), dim)
    expected = results(block, x, rows)
    use_kernels(block, library)
    for found, wanted in zip(results(block, x, rows), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5 * float(wanted.abs().max()) + 1e-7)


@pytest.mark.parametrize("parts", ["block", "loss"])
def test_more_threads_change_no_bit(library: KernelLibrary, parts: str) -> None:
    rows, block = rows_of([5, 90, 40, 1, 77] * 4, 0.3), block_of(32, 2, "bidirectional")
    use_kernels(block, library)
    x = torch.randn(rows.num_tokens, 32)
    queries_MD, weight = torch.randn(200, 32, requires_grad=True), torch.randn(300, 32, requires_grad=True)
    answers = torch.randint(0, 300, (200,))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            if parts == "block":
                found.append(results(block, x, rows))
            else:
                loss = cross_entropy_sum(queries_MD, weight, torch.zeros(300), answers, torch.ones(200), 0.0, library)
                found.append([loss.detach(), *torch.autograd.grad(loss, [queries_MD, weight])])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dim", [16, 64])
def test_the_kernel_drops_the_same_elements_as_torch(library: KernelLibrary, dim: int) -> None:
    rows, dropout = rows_of([3, 70, 1]), RowDropout(0.4, site=3)
    x = torch.randn(74, dim, requires_grad=True)
    expected = dropout(x, rows)
    use_kernels(dropout, library)
    found = dropout(x, rows)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x))
    assert torch.equal(found == 0, expected == 0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("queries", "items", "dim"), [(1, 1, 16), (31, 5, 16), (33, 300, 48), (100, 1000, 64)])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_cross_entropy_over_a_catalogue_equals_torchs(
    library: KernelLibrary, queries: int, items: int, dim: int, smoothing: float, spread: float
) -> None:
    torch.manual_seed(2)
    queries_MD, weight, bias = torch.randn(queries, dim) * spread, torch.randn(items, dim), torch.randn(items)
    inputs = [value.requires_grad_() for value in (queries_MD, weight, bias)]
    answers, weights = torch.randint(0, items, (queries,)), torch.rand(queries)
    logits = F.linear(queries_MD, weight, bias).double()
    losses = F.cross_entropy(logits, answers, reduction="none", label_smoothing=smoothing)
    expected = (losses * weights).sum()
    found = cross_entropy_sum(queries_MD, weight, bias, answers, weights, smoothing, library)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by", ["kernel", "torch"])
def test_seen_items_get_no_probability_except_an_answer(library: KernelLibrary, by: str) -> None:
    """The reference is torch's cross-entropy of logits that a loop over the histories has set to -inf."""
    torch.manual_seed(0)
    num_items = 20
    histories = [[3, 1, 7, 3], [20], [9, 2, 21, 5, 9]]  # 21 is no item
    answers = torch.tensor([0, 6, 2, 4, 0, 1, 4, 4, 8, 2])  # some are seen again
    tokens = torch.tensor([item for history in histories for item in history])
    begins, ends = torch.tensor([0] * 4 + [4] + [5] * 5), torch.arange(10) + 1
    queries_MD, weight, bias, weights = torch.randn(10, 16), torch.randn(20, 16), torch.randn(20), torch.rand(10)
    inputs = [value.requires_grad_() for value in (queries_MD, weight, bias)]
    is_seen = torch.zeros(10, num_items, dtype=torch.bool)
    for query, answer in enumerate(answers.tolist()):
        for token in tokens[begins[query] : ends[query]].tolist():
            if token <= num_items and token - 1 != answer:
                is_seen[query, token - 1] = True
    logits = F.linear(queries_MD, weight, bias).masked_fill(is_seen, -torch.inf)
    expected = (F.cross_entropy(logits, answers, reduction="none") * weights).sum()
    seen = Seen(tokens, begins, ends, longest=5)
    given = library if by == "kernel" else None
    found = cross_entropy_sum(queries_MD, weight, bias, answers, weights, library=given, seen=seen)
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_nan_stays_visible(library: KernelLibrary) -> None:
    rows, block = rows_of([4, 4]), block_of(16, 1, "bidirectional")
    use_kernels(block, library)
    x = torch.randn(8, 16)
    x[5, 3] = float("nan")
    out = block.eval()(x, rows)
    assert torch.isnan(out[4:]).all()
    assert torch.isfinite(out[:4]).all()
    weight, answers = torch.randn(9, 16), torch.zeros(8, dtype=torch.int64)
    loss = cross_entropy_sum(x, weight, torch.zeros(9), answers, torch.ones(8), 0.0, library)
    assert torch.isnan(loss)
