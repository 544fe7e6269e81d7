from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recmill.nn import transformer
from recmill.nn.losses import Loss
from recmill.nn.rows import Rows
from recmill.nn.sequences import Head, ItemTransformer
from recmill.nn.transformer import EncoderBlock, TransformerShape, attention_layout
from recmill.tables.spec import TableSpec

CPU = torch.device("cpu")
NUM_ITEMS = 20
MASK = NUM_ITEMS + 1
HEADS: list[Head] = ["linear", "tied"]
SOFTMAX = Loss()
NO_NEGATIVES = torch.empty(0, dtype=torch.int64)


def network(
    max_length: int = 5,
    num_layers: int = 1,
    dropout: float = 0.0,
    head: Head = "linear",
    loss: Loss = SOFTMAX,
    **shape: Any,
) -> ItemTransformer:
    """Untrained, with two heads."""
    torch.manual_seed(0)
    table = TableSpec("item", "item", NUM_ITEMS + 2, 8, 0.05)
    sizes = TransformerShape(max_length, num_layers, num_heads=2, dropout=dropout, **shape)
    return ItemTransformer(table, NUM_ITEMS, sizes, CPU, head, loss)


def packed(*rows: list[int]) -> tuple[Tensor, Tensor, int]:
    lengths = [len(row) for row in rows]
    return torch.tensor([token for row in rows for token in row]), torch.tensor(lengths), max(lengths)


@pytest.fixture(params=["eval", "train"])
def logits(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Logits of the last position of each history, with and without dropout, from an untrained BERT4Rec."""
    model = network(max_length=12, num_layers=2, dropout=0.3)
    model.train(request.param == "train")

    def compute(*rows: list[int], keys: list[int] | None = None) -> Tensor:
        tokens, lengths, longest = packed(*rows)
        with torch.no_grad():
            return model(tokens, lengths, longest, lengths.cumsum(0) - 1, torch.tensor(keys or range(len(rows))))

    return compute


HISTORIES = [[4, 17, 3, MASK], [9, 1, 2, 20, 5, 6, MASK], [8, MASK]]


def test_the_other_rows_of_a_batch_do_not_change_the_logits(logits: Callable[..., Tensor]) -> None:
    together = logits(*HISTORIES, keys=[11, 12, 13])
    assert together.shape == (3, NUM_ITEMS)
    for row, history in enumerate(HISTORIES):
        alone = logits(history, keys=[11 + row])
        torch.testing.assert_close(alone[0], together[row])


def test_the_logits_depend_on_every_item_on_both_sides_and_on_their_order(logits: Callable[..., Tensor]) -> None:
    reference = logits([4, 17, 3, MASK])
    for changed in ([5, 17, 3, MASK], [4, 17, 5, MASK], [17, 4, 3, MASK], [17, 3, MASK]):
        assert (logits(changed) - reference).abs().max() > 1e-4
    hidden_inside = logits([4, MASK, 3, 17])
    assert (logits([4, MASK, 9, 17]) - hidden_inside).abs().max() > 1e-4


def test_queries_select_positions_of_all_rows_together() -> None:
    model = network(dropout=0.3)
    inputs, keys = packed([3, MASK], [MASK, 5, 6]), torch.arange(2)
    everywhere = model(*inputs, torch.arange(5), keys)
    torch.testing.assert_close(model(*inputs, torch.tensor([1, 2]), keys), everywhere[[1, 2]])


@pytest.mark.parametrize("head", HEADS)
def test_with_answers_the_network_gives_the_loss_of_its_logits(head: Head) -> None:
    """Item i is column i - 1."""
    model = network(head=head)
    rows = packed([3, MASK], [MASK, 5, MASK])
    inputs = *rows, torch.tensor([1, 2, 4]), torch.zeros(2, dtype=torch.int64)
    answers, weights = torch.tensor([1, 20, 7]), torch.tensor([1.0, 1.0, 0.0])
    expected = F.cross_entropy(model(*inputs)[:2], torch.tensor([0, 19]), reduction="sum")
    torch.testing.assert_close(model(*inputs, (answers, weights, NO_NEGATIVES)), expected)


@pytest.mark.parametrize(
    ("attention", "rows", "queries", "answers", "seen"),
    [
        # At the third query, the answer is item 3 again.
        ("causal", [[3, 4, 5], [6, 7]], range(5), [4, 5, 3, 7, 8], [[3], [3, 4], [4, 5], [6], [6, 7]]),
        ("bidirectional", [[3, MASK, 5], [MASK, 7]], [1, 3], [5, 8], [[3], [7]]),  # item 5 is visible and an answer
    ],
)
def test_a_network_that_excludes_seen_items_compares_each_target_with_the_items_that_its_query_does_not_see(
    attention: Any, rows: list[list[int]], queries: Sequence[int], answers: list[int], seen: list[list[int]]
) -> None:
    model = network(loss=Loss(excludes_seen=True), attention=attention)
    inputs = *packed(*rows), torch.tensor(queries), torch.zeros(2, dtype=torch.int64)
    logits = model(*inputs)
    for query, items in enumerate(seen):
        logits[query, [item - 1 for item in items]] = -torch.inf
    targets = torch.tensor(answers)
    expected = F.cross_entropy(logits, targets - 1, reduction="sum")
    torch.testing.assert_close(model(*inputs, (targets, torch.ones(len(answers)), NO_NEGATIVES)), expected)


def test_a_tied_head_multiplies_with_the_rows_of_the_items() -> None:
    model = network(head="tied")
    inputs = *packed([3, 4]), torch.tensor([1]), torch.zeros(1, dtype=torch.int64)
    before = model(*inputs)
    with torch.no_grad():
        next(model.tables.parameters())[7] += torch.randn(8)  # not in the history
    changed = (model(*inputs) - before).abs()[0]
    assert changed.nonzero().flatten().tolist() == [6]


def rows_with_gradient(weight: Tensor) -> set[int]:
    assert weight.grad is not None
    return set(weight.grad.any(1).nonzero().flatten().tolist())


@pytest.mark.parametrize("head", HEADS)
def test_a_sampling_network_looks_at_answers_and_negatives_only(head: Head) -> None:
    loss = Loss("gbce", negatives=3, calibration=0.75)
    model = network(head=head, loss=loss, attention="causal")
    inputs = *packed([3, 4]), torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int64)
    answers, negatives, weights = torch.tensor([4, 9]), torch.tensor([2, 9, 20]), torch.ones(2)
    logits, power = model(*inputs), loss.power(NUM_ITEMS)
    expected = sum(
        -power * F.logsigmoid(logits[row, answer - 1])
        + sum(F.softplus(logits[row, item - 1]) for item in negatives.tolist() if item != answer)
        for row, answer in enumerate(answers.tolist())
    )
    found = model(*inputs, (answers, weights, negatives))
    torch.testing.assert_close(found, expected / 4)
    found.backward()
    if head == "tied":  # row i is item i, and the history has 3 and 4
        touched = rows_with_gradient(next(model.tables.parameters()))
        assert touched == {2, 3, 4, 9, 20}
    else:
        assert model.output is not None
        assert {row + 1 for row in rows_with_gradient(model.output.weight)} == {2, 4, 9, 20}


def test_a_network_with_window_norms_answers_queries_as_it_answers_everywhere() -> None:
    model = network(num_layers=2, dropout=0.3, norm="window")
    inputs, keys = packed([3, MASK], [MASK, 5, 6]), torch.arange(2)
    everywhere = model(*inputs, torch.arange(5), keys)
    torch.testing.assert_close(model(*inputs, torch.tensor([1, 2]), keys), everywhere[[1, 2]])
    assert {tuple(p.shape) for name, p in model.named_parameters() if "norm" in name} == {(5, 8), (8,)}


def causal_network() -> ItemTransformer:
    return network(max_length=6, num_layers=2, attention="causal")


def test_a_causal_position_sees_earlier_items_and_no_later_ones() -> None:
    model, key = causal_network(), torch.zeros(1, dtype=torch.int64)
    everywhere = torch.arange(4)
    reference = model(*packed([4, 17, 3, 9]), everywhere, key)
    later = model(*packed([4, 17, 5, 9]), everywhere, key)
    torch.testing.assert_close(later[:2], reference[:2])
    assert ((later[2:] - reference[2:]).abs().amax(1) > 1e-4).all()


def test_a_longer_row_beside_it_changes_nothing_for_a_causal_network() -> None:
    """torch's attention pads rows to the longest one."""
    model, keys = causal_network(), torch.zeros(2, dtype=torch.int64)
    alone = model(*packed([4, 17]), torch.tensor([0, 1]), keys[:1])
    beside = model(*packed([4, 17], [1, 2, 3, 4, 5]), torch.tensor([0, 1]), keys)
    torch.testing.assert_close(beside, alone)
    targets = torch.tensor([1]), torch.ones(1), NO_NEGATIVES
    loss = model(*packed([4, 17], [1, 2, 3, 4, 5]), torch.tensor([1]), keys, targets)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "layout"),
    [
        ((8, 0), torch.bfloat16, 32, "packed"),
        ((9, 0), torch.float16, 256, "packed"),
        ((12, 0), torch.bfloat16, 8, "packed"),
        ((7, 5), torch.float16, 32, "padded"),  # flash attention begins with Ampere
        ((8, 0), torch.float32, 32, "padded"),
        ((8, 0), torch.bfloat16, 20, "padded"),
        ((8, 0), torch.bfloat16, 264, "padded"),
        (None, torch.bfloat16, 32, "padded"),
    ],
)
def test_rows_stay_packed_where_flash_attention_can_take_them(
    capability: tuple[int, int] | None, dtype: torch.dtype, head_dim: int, layout: str
) -> None:
    assert attention_layout(capability, dtype, head_dim) == layout


def attend_row_by_row(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, *longest: int, window_size: Any
) -> Tensor:
    """Stand in for torch's varlen_attn, which needs a GPU, and check what its kernels require."""
    assert starts.dtype == torch.int32 and starts.is_contiguous() and starts is key_starts
    assert all(each.stride(-1) == 1 and each.shape == (11, 2, 8) for each in (query, key, value))
    lengths = starts.diff().tolist()
    assert longest == (max(lengths), max(lengths))
    assert window_size in ((-1, -1), (-1, 0))
    each_row = zip(*(each.split(lengths) for each in (query, key, value)), strict=True)
    rows = []
    for row in each_row:
        q, k, v = (each.transpose(0, 1) for each in row)
        rows.append(F.scaled_dot_product_attention(q, k, v, is_causal=window_size == (-1, 0)))
    return torch.cat([row.transpose(0, 1) for row in rows])


def block_and_rows(attention: transformer.Attention, device: str) -> tuple[EncoderBlock, Tensor, Rows]:
    """A block with two heads of 8 dims, and 11 tokens in rows of 4, 1 and 6."""
    torch.manual_seed(0)
    block = EncoderBlock(16, TransformerShape(8, 1, 2, dropout=0.3, attention=attention), site=1).to(device)
    x = torch.randn(11, 16).to(device).requires_grad_()
    rows = Rows(*(torch.tensor([4, 1, 6]).to(device), 6, torch.arange(11).to(device)), torch.arange(3).to(device), 11)
    return block, x, rows


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_packed_attention_equals_padded_attention(
    attention: transformer.Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, x, rows = block_and_rows(attention, "cpu")
    parameters = [x, *block.parameters()]
    padded = block(x, rows)
    expected = torch.autograd.grad(padded.square().sum(), parameters)
    monkeypatch.setattr(transformer, "attention_layout", lambda *facts: "packed")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_row_by_row)
    packed_ = block(x, rows)
    torch.testing.assert_close(packed_, padded)
    found = torch.autograd.grad(packed_.square().sum(), parameters)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_torch_accepts_what_packed_attention_gives_it(
    attention: transformer.Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own operator, forward and backward, without numbers: on the meta device."""
    monkeypatch.setattr(transformer, "attention_layout", lambda *facts: "packed")
    block, x, rows = block_and_rows(attention, "meta")
    out = block.bfloat16()(x.bfloat16(), rows)
    assert out.shape == (11, 16)
    out.sum().backward()
    assert block.query_key_value.weight.grad is not None
    assert block.query_key_value.weight.grad.shape == (48, 16)


def test_a_ligr_block_equals_torchs_attention_behind_gates() -> None:
    """x + sigmoid(W x + b) * attention(norm(x)), and the same around SwiGLU: with torch's own layers, row by row."""
    torch.manual_seed(0)
    block = EncoderBlock(16, TransformerShape(8, 1, 2, 0.0, "causal", block="ligr"), site=1)
    weights = dict(block.named_parameters())
    with torch.no_grad():
        for parameter in weights.values():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    attention.load_state_dict(
        {
            "in_proj_weight": weights["query_key_value.weight"],
            "in_proj_bias": weights["query_key_value.bias"],
            "out_proj.weight": weights["out.weight"],
            "out_proj.bias": weights["out.bias"],
        }
    )
    gate_weight, up_weight = weights["feed.gate_and_up.weight"].split(64)

    def expected(x: Tensor) -> Tensor:
        normed = F.layer_norm(x, (16,), weights["attention_norm.weight"], weights["attention_norm.bias"])[None]
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        attended = attention(normed, normed, normed, attn_mask=hidden)[0][0]
        x = x + (x @ weights["attention_gate.weight"].T + weights["attention_gate.bias"]).sigmoid() * attended
        normed = F.layer_norm(x, (16,), weights["feed_norm.weight"], weights["feed_norm.bias"])
        inner = F.silu(normed @ gate_weight.T) * (normed @ up_weight.T)
        fed = inner @ weights["feed.down.weight"].T
        return x + (x @ weights["feed_gate.weight"].T + weights["feed_gate.bias"]).sigmoid() * fed

    x, lengths = torch.randn(11, 16), [4, 1, 6]
    queries = torch.tensor([1, 3, 4, 10])
    rows = Rows(torch.tensor(lengths), 6, queries, torch.arange(3), 11)
    everywhere = torch.cat([expected(row) for row in x.split(lengths)])
    torch.testing.assert_close(block(x, rows), everywhere)
    torch.testing.assert_close(block(x, rows, "queries"), everywhere[queries])
    assert not any(name.startswith("feed.") and name.endswith("bias") for name in weights)
