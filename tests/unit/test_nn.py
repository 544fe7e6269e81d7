from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recmill import rng
from recmill.batch import CtrBatch, RankingBatch
from recmill.config.sections import EvalSection
from recmill.nn.cross_entropy import cross_entropy_sum
from recmill.nn.dropout import RowDropout
from recmill.nn.norms import WindowNorm
from recmill.nn.rows import Rows
from recmill.nn.sampled import Loss, gbce_sum
from recmill.nn.sequences import ItemTransformer
from recmill.tables.spec import TableSpec
from recmill.tasks import ctr, next_item
from recmill.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 1, CPU)
KEYS = torch.from_numpy(rng.bits(np.uint64(0), np.arange(1, 6)).view(np.int64))


def rows_of(lengths: list[int], keys: Tensor, queries: list[int] | None = None) -> Rows:
    tokens = sum(lengths)
    return Rows(torch.tensor(lengths), torch.tensor(range(tokens) if queries is None else queries), keys, tokens)


def dropped(probability: float, site: int, keys: Tensor, length: int = 200, dim: int = 16) -> Tensor:
    rows = rows_of([length] * len(keys), keys)
    return RowDropout(probability, site)(torch.ones(len(keys) * length, dim), rows).view(len(keys), length, dim)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("site", [0, 1, 7])
def test_dropout_drops_its_share_of_every_row_and_scales_up_the_rest(probability: float, site: int) -> None:
    out = dropped(probability, site, KEYS)
    assert torch.unique(out).tolist() == pytest.approx([0.0, 1 / (1 - probability)])
    assert (out == 0).float().mean(dim=(1, 2)).tolist() == pytest.approx([probability] * len(KEYS), abs=0.03)


def test_dropout_does_nothing_in_evaluation_or_with_probability_0() -> None:
    x, rows = torch.randn(15, 4), rows_of([3] * 5, KEYS)
    assert RowDropout(0.5, site=1).eval()(x, rows) is x
    assert RowDropout(0.0, site=1)(x, rows) is x


def test_dropout_masks_of_two_keys_or_two_sites_are_unrelated() -> None:
    """Independent masks of probability 1/2 agree in half of the 3,200 places."""
    masks = [dropped(0.5, site, KEYS)[row] == 0 for site in range(4) for row in range(len(KEYS))]
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert (one == other).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_neighbouring_elements_are_dropped_independently() -> None:
    mask = (dropped(0.5, 0, KEYS) == 0).flatten(1)
    for distance in (1, 2, 16, 32):
        agree = (mask[:, distance:] == mask[:, :-distance]).float().mean()
        assert agree.item() == pytest.approx(0.5, abs=0.03)


def test_dropout_repeats_itself_and_follows_its_row_through_any_batch() -> None:
    out = dropped(0.5, 3, KEYS)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(dropped(0.5, 3, KEYS), out)
    assert torch.equal(dropped(0.5, 3, KEYS[order]), out[order])
    assert torch.equal(dropped(0.5, 3, KEYS[2:3]), out[2:3])


def test_dropout_counts_from_a_rows_end() -> None:
    short, long = dropped(0.5, 2, KEYS, length=7), dropped(0.5, 2, KEYS, length=19)
    assert torch.equal(long[:, -7:], short)


NUM_ITEMS = 20
MASK = NUM_ITEMS + 1


def packed(*rows: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor([token for row in rows for token in row]), torch.tensor([len(row) for row in rows])


@pytest.fixture(params=["eval", "train"])
def logits(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Logits of the last place of each history, with and without dropout, from an untrained BERT4Rec."""
    torch.manual_seed(0)
    table = TableSpec("item", "item", NUM_ITEMS + 2, 8, 0.05)
    model = ItemTransformer(table, NUM_ITEMS, max_length=12, num_layers=2, num_heads=2, dropout=0.3, device=CPU)
    model.train(request.param == "train")

    def compute(*rows: list[int], keys: list[int] | None = None) -> Tensor:
        tokens, lengths = packed(*rows)
        with torch.no_grad():
            return model(tokens, lengths, lengths.cumsum(0) - 1, torch.tensor(keys or range(len(rows))))

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


def test_queries_choose_places_of_all_rows_together() -> None:
    torch.manual_seed(0)
    table = TableSpec("item", "item", NUM_ITEMS + 2, 8, 0.05)
    model = ItemTransformer(table, NUM_ITEMS, max_length=5, num_layers=1, num_heads=2, dropout=0.3, device=CPU)
    inputs, keys = packed([3, MASK], [MASK, 5, 6]), torch.arange(2)
    everywhere = model(*inputs, torch.arange(5), keys)
    torch.testing.assert_close(model(*inputs, torch.tensor([1, 2]), keys), everywhere[[1, 2]])


def ctr_batch(labels: list[float], weights: list[float]) -> CtrBatch:
    nothing = KeyedJaggedTensor(keys=[], values=torch.empty(0), lengths=torch.empty(0, dtype=torch.int32))
    return CtrBatch(torch.zeros(len(labels), 1), nothing, torch.tensor(labels), torch.tensor(weights))


def test_click_loss_is_a_sum_that_ignores_fillers() -> None:
    """Probabilities .8, .25 and one that must not count: -log .8 - log .75."""
    logits = torch.log(torch.tensor([0.8 / 0.2, 0.25 / 0.75, 0.9 / 0.1])).requires_grad_()
    loss = ctr.loss_sum(logits, ctr_batch([1.0, 0.0, 0.0], [1.0, 1.0, 0.0]))
    assert loss.item() == pytest.approx(-np.log(0.8) - np.log(0.75), rel=1e-6)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([0.8 - 1, 0.25, 0.0], abs=1e-6)


def test_click_metrics_ignore_fillers() -> None:
    metrics = ctr.new_metrics(EvalSection())
    ctr.update(metrics, torch.tensor([2.0, -1.0, 9.0]), ctr_batch([1.0, 0.0, 0.0], [1.0, 1.0, 0.0]))
    values = metrics.compute(ALONE)
    assert (values["auroc"], values["rows"]) == (1.0, 2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("at_once", [1, 3 * NUM_ITEMS, 1 << 20])
def test_cross_entropy_in_chunks_is_torchs_summed_and_ignores_fillers(
    at_once: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recmill.nn.cross_entropy._LOGITS_AT_ONCE", at_once)
    torch.manual_seed(0)
    asked, weight, bias = torch.randn(7, 5), torch.randn(NUM_ITEMS, 5), torch.randn(NUM_ITEMS)
    answers, weights = torch.randint(0, NUM_ITEMS, (7,)), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.5, 1.0])
    inputs = [value.requires_grad_() for value in (asked, weight, bias)]
    losses = F.cross_entropy(F.linear(asked, weight, bias), answers, reduction="none", label_smoothing=smoothing)
    expected = (losses * weights).sum()
    found = cross_entropy_sum(asked, weight, bias, answers, weights, smoothing)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * found, inputs), torch.autograd.grad(3 * expected, inputs))


@pytest.mark.parametrize("is_tied", [False, True])
def test_with_answers_the_network_gives_the_loss_of_its_logits(is_tied: bool) -> None:
    """Item i is column i - 1."""
    torch.manual_seed(0)
    table = TableSpec("item", "item", NUM_ITEMS + 2, 8, 0.05)
    model = ItemTransformer(table, NUM_ITEMS, 5, 1, 2, 0.0, CPU, is_tied=is_tied)
    rows = packed([3, MASK], [MASK, 5, MASK])
    inputs = *rows, torch.tensor([1, 2, 4]), torch.zeros(2, dtype=torch.int64)
    answers, weights = torch.tensor([1, 20, 7]), torch.tensor([1.0, 1.0, 0.0])
    expected = F.cross_entropy(model(*inputs)[:2], torch.tensor([0, 19]), reduction="sum")
    torch.testing.assert_close(model(*inputs, answers, weights), expected)


def test_a_tied_head_multiplies_with_the_rows_of_the_items() -> None:
    torch.manual_seed(0)
    table = TableSpec("item", "item", NUM_ITEMS + 1, 8, 0.05)
    model = ItemTransformer(table, NUM_ITEMS, 5, 1, 2, 0.0, CPU, is_tied=True)
    inputs = *packed([3, 4]), torch.tensor([1]), torch.zeros(1, dtype=torch.int64)
    before = model(*inputs)
    with torch.no_grad():
        next(model.tables.parameters())[7] += torch.randn(8)  # not of the history
    changed = (model(*inputs) - before).abs()[0]
    assert changed.nonzero().flatten().tolist() == [6]


def test_gbce_by_hand() -> None:
    """Scores 2 and -1 of the answers 3 and 5; of the negatives 1 and 3 scores 0.5 and 2, 1 and 0: one is an answer."""
    loss = Loss("gbce", negatives=2, calibration=0.5)
    power = loss.power(num_items=5)  # rate 2 / 4, so 0.5 * (0.5 * (1 - 2) + 2)
    assert power == pytest.approx(0.75)
    asked = torch.eye(2)
    head = torch.tensor([[2.0, 9.0], [9.0, -1.0], [0.5, 1.0], [2.0, 0.0]])
    found = gbce_sum(asked, head, torch.zeros(4), torch.tensor([3, 5, 1, 3]), torch.tensor([1.0, 2.0]), power)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    first = -power * np.log(sigmoid(2)) - np.log(1 - sigmoid(0.5))
    second = -power * np.log(sigmoid(-1)) - np.log(1 - sigmoid(1)) - np.log(1 - sigmoid(0))
    assert found.item() == pytest.approx((first + 2 * second) / 3, rel=1e-6)


@pytest.mark.parametrize(("calibration", "power"), [(0.0, 1.0), (1.0, 0.25)])
def test_gbce_is_plain_without_calibration_and_takes_the_rate_with_all_of_it(calibration: float, power: float) -> None:
    loss = Loss("gbce", negatives=5, calibration=calibration)
    assert loss.power(num_items=21) == pytest.approx(power)
    assert loss.power(num_items=3) == loss.power(num_items=1) == 1.0, "with more negatives than items nothing is undone"


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_sampling_network_looks_at_answers_and_negatives_only(is_tied: bool) -> None:
    torch.manual_seed(0)
    table, loss = TableSpec("item", "item", NUM_ITEMS + 1, 8, 0.05), Loss("gbce", negatives=3, calibration=0.75)
    model = ItemTransformer(table, NUM_ITEMS, 5, 1, 2, 0.0, CPU, is_causal=True, is_tied=is_tied, loss=loss)
    inputs = *packed([3, 4]), torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int64)
    answers, negatives, weights = torch.tensor([4, 9]), torch.tensor([2, 9, 20]), torch.ones(2)
    logits, power = model(*inputs), loss.power(NUM_ITEMS)
    expected = sum(
        -power * F.logsigmoid(logits[row, answer - 1])
        + sum(F.softplus(logits[row, item - 1]) for item in negatives.tolist() if item != answer)
        for row, answer in enumerate(answers.tolist())
    )
    found = model(*inputs, answers, weights, negatives)
    torch.testing.assert_close(found, expected / 4)
    found.backward()
    head = next(model.tables.parameters()) if is_tied else model.output.weight  # type: ignore[union-attr]
    assert head.grad is not None
    touched = head.grad.any(1).nonzero().flatten() + (0 if is_tied else 1)
    assert set(touched.tolist()) == {2, 4, 9, 20} | ({3} if is_tied else set())


def test_a_window_norm_is_torchs_over_places_and_dims() -> None:
    torch.manual_seed(0)
    norm = WindowNorm(4, 8)
    with torch.no_grad():
        norm.weight.add_(torch.randn(4, 8))
        norm.bias.add_(torch.randn(4, 8))
    x = torch.randn(6, 8)
    rows = rows_of([4, 2], KEYS[:2])
    padded = torch.stack([x[:4], torch.cat([torch.zeros(2, 8), x[4:]])])
    expected = F.layer_norm(padded, (4, 8), norm.weight, norm.bias)
    torch.testing.assert_close(norm(x, rows), torch.cat([expected[0], expected[1, 2:]]))


def test_a_network_with_window_norms_answers_queries_as_it_answers_everywhere() -> None:
    torch.manual_seed(0)
    table = TableSpec("item", "item", NUM_ITEMS + 2, 8, 0.05)
    model = ItemTransformer(table, NUM_ITEMS, 5, 2, 2, 0.3, CPU, norm="window")
    inputs, keys = packed([3, MASK], [MASK, 5, 6]), torch.arange(2)
    everywhere = model(*inputs, torch.arange(5), keys)
    torch.testing.assert_close(model(*inputs, torch.tensor([1, 2]), keys), everywhere[[1, 2]])
    assert {tuple(p.shape) for name, p in model.named_parameters() if "norm" in name} == {(5, 8), (8,)}


def causal(length: int = 6) -> ItemTransformer:
    torch.manual_seed(0)
    table = TableSpec("item", "item", NUM_ITEMS + 1, 8, 0.05)
    return ItemTransformer(table, NUM_ITEMS, length, 2, 2, 0.0, CPU, is_causal=True)


def test_a_causal_place_sees_what_was_before_it_and_nothing_after() -> None:
    model, key = causal(), torch.zeros(1, dtype=torch.int64)
    everywhere = torch.arange(4)
    reference = model(*packed([4, 17, 3, 9]), everywhere, key)
    later = model(*packed([4, 17, 5, 9]), everywhere, key)
    torch.testing.assert_close(later[:2], reference[:2])
    assert ((later[2:] - reference[2:]).abs().amax(1) > 1e-4).all()


def test_a_longer_row_beside_it_changes_nothing_for_a_causal_network() -> None:
    """torch's attention pads rows to the longest."""
    model, keys = causal(), torch.zeros(2, dtype=torch.int64)
    alone = model(*packed([4, 17]), torch.tensor([0, 1]), keys[:1])
    beside = model(*packed([4, 17], [1, 2, 3, 4, 5]), torch.tensor([0, 1]), keys)
    torch.testing.assert_close(beside, alone)
    loss = model(*packed([4, 17], [1, 2, 3, 4, 5]), torch.tensor([1]), keys, torch.tensor([1]), torch.ones(1))
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


NAN = float("nan")


def ranking_batch(
    answers: list[int], seen: list[list[int]], negatives: list[list[int]], weights: list[float] | None = None
) -> RankingBatch:
    rows = len(answers)
    return RankingBatch(
        tokens_N=torch.full((rows,), MASK),
        lengths_B=torch.ones(rows, dtype=torch.int64),
        queries_M=torch.arange(rows),
        answers_M=torch.tensor(answers),
        weights_M=torch.tensor(weights or [1.0] * rows),
        row_keys_B=torch.zeros(rows, dtype=torch.int64),
        negatives_K=torch.empty(0, dtype=torch.int64),
        seen_rows=torch.tensor([row for row, items in enumerate(seen) for _ in items], dtype=torch.int64),
        seen_items=torch.tensor([item for items in seen for item in items], dtype=torch.int64),
        negatives_BC=torch.tensor(negatives, dtype=torch.int64).view(rows, -1),
    )


@pytest.mark.parametrize(
    ("scores", "answer", "seen", "rank"),
    [
        ([5.0, 4.0, 3.0, 2.0, 1.0], 1, [], 0),
        ([5.0, 4.0, 3.0, 2.0, 1.0], 3, [], 2),
        ([5.0, 4.0, 3.0, 2.0, 1.0], 5, [], 4),
        ([5.0, 4.0, 3.0, 2.0, 1.0], 3, [1], 1),  # an item met before is no candidate
        ([5.0, 4.0, 3.0, 2.0, 1.0], 3, [1, 2, 4], 0),
        ([5.0, 4.0, 3.0, 2.0, 1.0], 3, [3], 2),  # met before, and the target all the same
        ([1.0, 1.0, 1.0, 1.0, 1.0], 3, [], 4),  # ties count against the model
        ([1.0, 1.0, 1.0, 1.0, 1.0], 3, [2, 5], 2),
        ([5.0, 4.0, NAN, 2.0, 1.0], 3, [], 4),  # no score is the worst score
        ([5.0, 4.0, NAN, 2.0, 1.0], 3, [1], 3),
        ([NAN, 4.0, 3.0, 2.0, NAN], 2, [], 2),  # and another item's counts against the model
    ],
)
def test_full_rank_is_the_number_of_other_unseen_items_that_score_at_least_as_high(
    scores: list[float], answer: int, seen: list[int], rank: int
) -> None:
    """Between two other rows, of which one has met everything."""
    logits = torch.tensor([[0.0] * 5, scores, [0.0] * 5])
    batch = ranking_batch([1, answer, 1], [[1, 2, 3, 4, 5], seen, []], [[]] * 3)
    answers = batch.answers_M[:, None] - 1
    ranks = next_item.full_ranks(logits, logits.gather(1, answers), answers, batch)
    assert ranks.tolist() == [0, rank, 4]


def test_ranking_metrics_take_each_protocols_candidates_and_no_fillers() -> None:
    """Target third of five. `full` without the seen item: 2nd; among the negatives 4 and 5: 1st; with a tie: 2nd.

    By popularity the target ties with item 4, behind 1 and 2. Negatives of `pop100` come before those of `uni100`.
    """
    counts = np.array([9, 8, 3, 3, 1])
    section = EvalSection(protocols=["uni100", "full", "pop100"], ks=[1, 2])
    metrics = next_item.new_metrics(section, train_counts=counts)
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0], [5.0, 4.0, 3.0, 3.0, 1.0], [9.0, 0.0, 0.0, 0.0, 0.0]])
    batch = ranking_batch([3, 3, 1], [[1], [], []], [[4, 5, 1, 2], [4, 5, 1, 5], [4, 5, 2, 3]], weights=[1.0, 1.0, 0.0])
    next_item.update(metrics, logits, batch)
    values = metrics.compute(ALONE)
    assert values == {
        "uni100/hr@1": 0.0,  # behind 1 and 2; behind 1
        "uni100/hr@2": 0.5,
        "uni100/ndcg@1": 0.0,
        "uni100/ndcg@2": pytest.approx(0.5 / np.log2(3)),
        "uni100/mrr@1": 0.0,
        "uni100/mrr@2": 0.25,
        "full/hr@1": 0.0,
        "full/hr@2": 0.5,
        "full/ndcg@1": 0.0,
        "full/ndcg@2": pytest.approx(0.5 / np.log2(3)),
        "full/mrr@1": 0.0,
        "full/mrr@2": 0.25,
        "pop100/hr@1": 0.5,
        "pop100/hr@2": 1.0,
        "pop100/ndcg@1": 0.5,
        "pop100/ndcg@2": pytest.approx((1 + 1 / np.log2(3)) / 2),
        "pop100/mrr@1": 0.5,
        "pop100/mrr@2": 0.75,
        "users": 2,
        "popularity/uni100/hr@1": 0.0,
        "popularity/uni100/hr@2": 0.5,
        "popularity/uni100/ndcg@1": 0.0,
        "popularity/uni100/ndcg@2": pytest.approx(0.5 / np.log2(3)),
        "popularity/uni100/mrr@1": 0.0,
        "popularity/uni100/mrr@2": 0.25,
        "popularity/full/hr@1": 0.0,  # behind 2 and 4; behind 1, 2 and 4
        "popularity/full/hr@2": 0.0,
        "popularity/full/ndcg@1": 0.0,
        "popularity/full/ndcg@2": 0.0,
        "popularity/full/mrr@1": 0.0,
        "popularity/full/mrr@2": 0.0,
        "popularity/pop100/hr@1": 0.0,  # both behind 4
        "popularity/pop100/hr@2": 1.0,
        "popularity/pop100/ndcg@1": 0.0,
        "popularity/pop100/ndcg@2": pytest.approx(1 / np.log2(3)),
        "popularity/pop100/mrr@1": 0.0,
        "popularity/pop100/mrr@2": 0.5,
    }
    assert next_item.headline(values) == values["uni100/ndcg@2"]


def test_a_nan_target_comes_last_among_the_negatives() -> None:
    metrics = next_item.new_metrics(EvalSection(protocols=["pop100"], ks=[2, 3]))
    next_item.update(metrics, torch.tensor([[0.0, NAN, 0.0]]), ranking_batch([2], [[]], [[1, 3]]))
    values = metrics.compute(ALONE)
    assert (values["pop100/hr@2"], values["pop100/hr@3"]) == (0.0, 1.0)
