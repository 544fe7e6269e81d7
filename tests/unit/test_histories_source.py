from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recmill import prepare
from recmill.batch import RankingBatch, SequenceBatch
from recmill.data.histories import HistorySource
from recmill.data.opening import open_dataset
from recmill.data.share import Batching
from recmill.data.windows import WindowRules
from recmill.errors import DataError

Row = tuple[Any, ...]
MASKING = WindowRules(max_length=10, step=10, probability=0.3, last_only=0.2)
MASK = 201  # the histories have 200 items


def history_source(path: Path, rank: int = 0, size: int = 1, **options: Any) -> HistorySource:
    """`options`: fields of Batching, and arguments of HistorySource."""
    chosen: dict[str, Any] = {"order": "shuffled", "seed": 1, "train_batch_size": 25, "eval_batch_size": 40} | options
    batching = {field.name: chosen.pop(field.name) for field in fields(Batching) if field.name in chosen}
    rules, protocols = chosen.pop("window_rules", MASKING), chosen.pop("protocols", ["full", "pop100"])
    return HistorySource(open_dataset(path), Batching(rank=rank, size=size, **batching), rules, protocols, **chosen)


def windows_of(batch: SequenceBatch) -> list[Row]:
    """Return (tokens, {position from the end: answer}, key) of each window that counts."""
    ends = batch.lengths_B.cumsum(0).tolist()
    tokens = [row.tolist() for row in batch.tokens_N.split(batch.lengths_B.tolist())]
    hidden: list[dict[int, int]] = [{} for _ in tokens]
    weights: list[set[float]] = [set() for _ in tokens]
    for query, answer, weight in zip(batch.queries_M.tolist(), batch.answers_M.tolist(), batch.weights_M, strict=True):
        row = bisect_right(ends, query)
        hidden[row][ends[row] - query] = answer
        weights[row].add(float(weight))
    assert batch.queries_M.tolist() == sorted(batch.queries_M.tolist()), "in order of the rows"
    found = []
    for items, answers, weight, key in zip(tokens, hidden, weights, batch.row_keys_B.tolist(), strict=True):
        assert weight in ({0.0}, {1.0}), "all of a window counts, or nothing of it"
        if weight == {1.0}:
            found.append((tuple(items), tuple(sorted(answers.items())), key))
    return found


def history_epoch(path: Path, size: int = 1, epoch: int = 0, first: int = 0, **options: Any) -> list[list[Row]]:
    ranks = [history_source(path, rank, size, **options).train_batches(epoch, first) for rank in range(size)]
    return [[row for part in parts for row in windows_of(part)] for parts in zip(*ranks, strict=True)]


def unmasked(window: Row) -> tuple[int, ...]:
    tokens, answers, _ = window
    items = list(tokens)
    for from_end, answer in answers:
        assert items[-from_end] == MASK
        items[-from_end] = answer
    return tuple(items)


def all_histories(path: Path) -> list[list[int]]:
    items, offsets = np.load(path / "items.npy"), np.load(path / "offsets.npy")
    return [items[a:b].tolist() for a, b in pairwise(offsets)]


def test_a_shortened_window_asks_for_its_last_item(histories: Path) -> None:
    """It is a beginning of the full window, another one in each epoch."""
    window_rules = replace(MASKING, last_only=1.0)
    found: list[set[tuple[int, int]]] = []
    for epoch in (0, 1):
        whole, cut = (
            [w for b in history_source(histories, window_rules=m).train_batches(epoch, 0) for w in windows_of(b)]
            for m in (window_rules, replace(window_rules, last_anywhere=True))
        )
        lengths = set()
        for (uncut, answers, key), (tokens, asked, same_key) in zip(whole, cut, strict=True):
            assert key == same_key
            items = [*uncut[:-1], answers[0][1]]
            assert tokens == (*items[: len(tokens) - 1], MASK)
            assert asked == ((1, items[len(tokens) - 1]),)
            assert min(2, len(items)) <= len(tokens) <= len(items)
            lengths.add((key, len(tokens)))
        found.append(lengths)
        shares = [len(tokens) / len(uncut) for (uncut, *_), (tokens, *_) in zip(whole, cut, strict=True)]
        assert 0.5 < sum(shares) / len(shares) < 0.75  # short windows cannot be shortened much
    assert found[0] != found[1]


def test_trained_on_validation_only_the_last_item_is_held_out(histories: Path) -> None:
    window_rules = replace(MASKING, last_only=0.0, last_too=True)
    windows = [
        w for batch in history_epoch(histories, train_on_validation=True, window_rules=window_rules) for w in batch
    ]
    ends = {tuple(history[:-1][-10:]) for history in all_histories(histories)}
    last = [window for window in windows if unmasked(window) in ends]
    assert {unmasked(window) for window in last} == ends
    assert all(answers[0][0] == 1 for _, answers, _ in last), "the validation item is the last to train on"


def test_negatives_are_the_same_on_every_rank_and_other_ones_in_each_batch(histories: Path) -> None:
    window_rules = replace(MASKING, probability=0.0, last_only=0.0, predicts_next=True, negatives=500)
    one, *ranks = (
        [
            batch.negatives_K.tolist()
            for batch in history_source(histories, rank, size, window_rules=window_rules).train_batches(3, 1)
        ]
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    assert ranks == [one, one]
    assert len({tuple(negatives) for negatives in one}) == len(one) > 1
    assert all(len(negatives) == 500 for negatives in one)
    assert {1, 200} <= {item for negatives in one for item in negatives} <= set(range(1, 201))


@pytest.mark.parametrize("order", ["shuffled", "file"])
def test_an_epoch_holds_every_window_once_with_its_original_items_as_answers(histories: Path, order: str) -> None:
    windows = [window for batch in history_epoch(histories, size=2, order=order) for window in batch]
    assert all(answers for _, answers, _ in windows), "every window asks for something"
    expected = []
    for history in all_histories(histories):
        items = history[:-2]
        while items:
            expected.append(tuple(items[-10:]))
            items = items[:-10]
    found = [unmasked(window) for window in windows]
    assert Counter(found) == Counter(expected)
    assert (found == expected) == (order == "file")


EVERY_KIND = replace(MASKING, step=4, last_too=True, random=0.3, kept=0.2, copies=2)


@pytest.mark.parametrize("window_rules", [MASKING, EVERY_KIND])
def test_a_batch_of_windows_and_its_masks_are_the_same_for_any_world_size(
    histories: Path, window_rules: WindowRules
) -> None:
    one, two, three = (history_epoch(histories, size=size, window_rules=window_rules) for size in (1, 2, 3))
    assert one == two == three


@pytest.mark.parametrize("order", ["shuffled", "file", "batch"])
@pytest.mark.parametrize("rules", [MASKING, replace(MASKING, predicts_next=True)])
def test_tokens_read_ahead_are_those_of_all_ranks_in_a_batch(histories: Path, order: str, rules: WindowRules) -> None:
    """Also in another epoch than the batches that are made meanwhile."""
    source = history_source(histories, rank=1, size=3, order=order, window_rules=rules)
    for epoch in (1, 0):
        under_way = source.train_batches(0, 0)
        for number, rows in enumerate(history_epoch(histories, size=3, epoch=epoch, order=order, window_rules=rules)):
            next(under_way)
            assert source.global_ids(epoch, number)["item"].tolist() == [token for row in rows for token in row[0]]


def test_a_rank_without_windows_gets_a_filler_of_weight_0(histories: Path) -> None:
    first, *_ = history_source(histories, rank=0, size=30, train_batch_size=25).train_batches(0, 0)
    assert len(first.lengths_B) == 1
    assert len(first.queries_M) >= 1
    assert first.weight() == 0.0


@pytest.mark.parametrize("first", [1, 5])
def test_history_batches_from_the_middle_are_the_tail_of_the_epoch(histories: Path, first: int) -> None:
    whole = history_epoch(histories, epoch=2)
    assert len(whole) == history_source(histories).batches_per_epoch > 5
    assert history_epoch(histories, epoch=2, first=first) == whole[first:]


def test_an_epoch_resumed_again_and_again_holds_every_window_once_in_the_same_order(histories: Path) -> None:
    """Each time with another number of processes, from where the one before it stopped."""
    pieces = [(0, 3, 2), (3, 4, 1), (4, 9, 5), (9, 13, 3)]  # first batch, end, processes
    parts = [history_epoch(histories, size, epoch=2, first=first)[: end - first] for first, end, size in pieces]
    assert [batch for part in parts for batch in part] == history_epoch(histories, epoch=2)


@pytest.mark.parametrize("change", [{"epoch": 1}, {"seed": 2}])
def test_masks_and_keys_are_new_for_each_epoch_and_seed(histories: Path, change: dict[str, int]) -> None:
    one, other = (
        {unmasked(w): w for batch in history_epoch(histories, order="file", **options) for w in batch}
        for options in ({}, change)
    )
    assert one.keys() == other.keys()
    long = [items for items in one if len(items) == 10]
    assert np.mean([one[items][1] != other[items][1] for items in long]) > 0.8
    assert not {w[2] for w in one.values()} & {w[2] for w in other.values()}


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_each_item_is_masked_with_the_mask_probability(histories: Path, probability: float) -> None:
    window_rules = WindowRules(max_length=50, step=50, probability=probability, last_only=0.0)
    items = hidden = 0
    for epoch in range(5):
        for window in (w for batch in history_epoch(histories, epoch=epoch, window_rules=window_rules) for w in batch):
            # The last position is left out: it is also masked where nothing else is.
            items += len(window[0]) - 1
            hidden += sum(from_end > 1 for from_end, _ in window[1])
    assert hidden / items == pytest.approx(probability, abs=0.02)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_in_a_share_of_the_windows_only_the_last_item_is_masked(histories: Path, share: float) -> None:
    """With a mask probability of 1 all others mask everything."""
    window_rules = WindowRules(max_length=10, step=10, probability=1.0, last_only=share)
    windows = [
        w
        for epoch in range(4)
        for batch in history_epoch(histories, epoch=epoch, window_rules=window_rules)
        for w in batch
    ]
    places = [(len(items), [from_end for from_end, _ in answers]) for items, answers, _ in windows if len(items) > 1]
    assert all(hidden in ([1], list(range(1, count + 1))) for count, hidden in places)
    assert np.mean([hidden == [1] for _, hidden in places]) == pytest.approx(share, abs=0.08)


@pytest.mark.parametrize(("random", "kept"), [(0.0, 0.0), (0.1, 0.1), (0.2, 0.0), (0.0, 0.4), (0.3, 0.7)])
def test_masked_items_are_replaced_by_the_mask_or_random_items_or_stay_visible(
    histories: Path, random: float, kept: float
) -> None:
    window_rules = replace(MASKING, probability=0.5, random=random, kept=kept)
    pairs = [
        (tokens[-from_end], answer)
        for epoch in range(10)
        for batch in history_epoch(histories, epoch=epoch, window_rules=window_rules)
        for tokens, answers, _ in batch
        for from_end, answer in answers
    ]
    others = [seen for seen, answer in pairs if seen not in (MASK, answer)]
    found = [sum(seen == MASK for seen, _ in pairs), sum(seen == answer for seen, answer in pairs), len(others)]
    luck = random / 200  # a random item may be the hidden one
    for count, share in zip(found, [1 - random - kept, kept + luck, random - luck], strict=True):
        assert count / len(pairs) == pytest.approx(share, abs=5 * (share * (1 - share) / len(pairs)) ** 0.5 + 1e-9)
    if random:
        assert set(others) <= set(range(1, 201))
        quarters = np.histogram(others, bins=4, range=(1, 201))[0] / len(others)
        assert quarters == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / len(others)) ** 0.5), "every item is as likely"


def test_copies_of_a_window_have_masks_of_their_own_and_count_as_samples(histories: Path) -> None:
    window_rules = replace(MASKING, copies=3)
    source = history_source(histories, window_rules=window_rules)
    once = history_source(histories)
    assert source.samples_per_epoch == 3 * once.samples_per_epoch
    assert {len(history_epoch(histories, size=size, window_rules=window_rules)) for size in (1, 2)} == {
        source.batches_per_epoch
    }
    found: dict[tuple[int, ...], list[Row]] = {}
    for window in (window for batch in history_epoch(histories, window_rules=window_rules) for window in batch):
        found.setdefault(unmasked(window), []).append(window)
    assert Counter({items: len(copies) // 3 for items, copies in found.items()}) == Counter(
        unmasked(window) for batch in history_epoch(histories) for window in batch
    )
    long = [copies for items, copies in found.items() if len(items) == 10]
    assert np.mean([len({answers for _, answers, _ in copies}) == len(copies) for copies in long]) > 0.7
    keys = [key for copies in found.values() for _, _, key in copies]
    assert len(set(keys)) == len(keys) == source.samples_per_epoch


def test_the_last_training_item_of_a_history_can_always_be_masked_beside_others(histories: Path) -> None:
    window_rules = replace(MASKING, last_only=0.0, last_too=True)
    windows = [
        window for batch in history_epoch(histories, order="file", window_rules=window_rules) for window in batch
    ]
    ends = {tuple(history[:-2][-10:]) for history in all_histories(histories)}
    last = [window for window in windows if unmasked(window) in ends]
    rest = [window for window in windows if unmasked(window) not in ends]
    assert len(last) == len(ends) == 101
    assert all(answers[0][0] == 1 for _, answers, _ in last)
    assert np.mean([len(answers) for tokens, answers, _ in last if len(tokens) == 10]) == pytest.approx(3.7, abs=0.6)
    assert 0 < np.mean([answers[0][0] == 1 for tokens, answers, _ in rest if len(tokens) > 5]) < 0.8


@pytest.mark.parametrize(("order", "limit"), [("file", 0), ("file", 2), ("shuffled", 0)])
def test_window_facts_state_the_share_of_padding(histories: Path, order: str, limit: int) -> None:
    options: dict[str, Any] = {"order": order, "max_batches": {"train": limit}}
    batches = [[len(tokens) for tokens, *_ in batch] for batch in history_epoch(histories, **options)]
    padded = sum(max(lengths) * len(lengths) for lengths in batches)
    share = 1 - sum(map(sum, batches)) / padded
    every = [len(tokens) for batch in history_epoch(histories) for tokens, *_ in batch]
    assert history_source(histories, **options).window_facts() == (
        f"windows: {len(every)} of 101 histories, {np.mean(every):.1f} items on average; "
        f"batches padded to their longest would be {100 * share:.1f}% padding"
    )


def test_shuffled_batches_hold_windows_of_like_length(histories: Path) -> None:
    """Little padding: all the windows of 32 batches are sorted by length together."""
    *batches, last = (
        [len(tokens) for tokens, _, _ in batch] for batch in history_epoch(histories, train_batch_size=10)
    )
    ranges = sorted((min(lengths), max(lengths)) for lengths in [*batches, last])
    assert all(one[1] <= other[0] for one, other in pairwise(ranges))
    assert [len(lengths) for lengths in batches] == [10] * len(batches)
    firsts = [lengths[0] for lengths in batches]
    assert firsts != sorted(firsts), "the batches themselves are in random order"


def ranking_rows(path: Path, split: str, size: int = 1, **options: Any) -> Iterator[Row]:
    """Yield (tokens, answer, seen items, negatives) of every user, in order."""
    ranks = [history_source(path, rank, size, **options).eval_batches(split) for rank in range(size)]
    for batch in (part for parts in zip(*ranks, strict=True) for part in parts):
        assert isinstance(batch, RankingBatch)
        assert batch.queries_M.tolist() == (batch.lengths_B.cumsum(0) - 1).tolist(), "the last positions"
        tokens = batch.tokens_N.split(batch.lengths_B.tolist())
        for row in batch.weights_M.nonzero().flatten().tolist():
            seen = batch.seen_items[batch.seen_rows == row].tolist()
            yield tokens[row].tolist(), int(batch.answers_M[row]), seen, batch.negatives_BC[row].tolist()


@pytest.mark.parametrize(("split", "from_end"), [("test", 1), ("val", 2)])
@pytest.mark.parametrize("size", [1, 3])
def test_evaluation_asks_each_user_for_the_item_after_the_history(
    histories: Path, split: str, from_end: int, size: int
) -> None:
    users = all_histories(histories)
    rows = list(ranking_rows(histories, split, size, eval_batch_size=25))
    assert len(rows) == len(users)
    for (tokens, answer, seen, _), history in zip(rows, users, strict=True):
        before = history[:-from_end]
        assert answer == history[-from_end]
        assert seen == before
        assert (history[-2] in seen) == (split == "test"), "the validation item"
        expected = [*before[-9:], MASK]
        assert tokens == [0] * (len(tokens) - len(expected)) + expected
    assert history_source(histories, eval_batch_size=25).num_eval_batches(split) == 5


def test_negatives_are_100_items_the_user_never_sees_and_the_same_for_any_world_size(histories: Path) -> None:
    users = all_histories(histories)
    asked: dict[str, Any] = {"protocols": ["uni100", "full", "pop100"]}
    val = [row[3] for row in ranking_rows(histories, "val", **asked)]
    test = [row[3] for row in ranking_rows(histories, "test", **asked)]
    for history, *both in zip(users, val, test, strict=True):
        drawn = [part for negatives in both for part in (negatives[:100], negatives[100:])]
        for negatives in drawn:
            assert len(negatives) == len(set(negatives)) == 100
            assert not set(negatives) & set(history)
        assert len({frozenset(negatives) for negatives in drawn}) == 4
    assert test == [row[3] for row in ranking_rows(histories, "test", size=3, eval_batch_size=7, **asked)]
    assert [row[:100] for row in test] == [row[3] for row in ranking_rows(histories, "test", protocols=["pop100"])]
    assert [row[100:] for row in test] == [row[3] for row in ranking_rows(histories, "test", protocols=["uni100"])]


def test_for_the_whole_catalogue_no_negatives_are_drawn(histories: Path) -> None:
    assert all(row[3] == [] for row in ranking_rows(histories, "val", protocols=["full"]))


def test_training_counts_leave_out_validation_and_test_items(histories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [0] * 200
    for history in all_histories(histories):
        for item in history[:-2]:
            expected[item - 1] += 1
    monkeypatch.setattr("recmill.data.histories._COUNT_BLOCK_ITEMS", 400)
    assert history_source(histories).train_counts().tolist() == expected
    for history in all_histories(histories):
        expected[history[-2] - 1] += 1
    assert history_source(histories, train_on_validation=True).train_counts().tolist() == expected


@pytest.mark.parametrize("protocol", ["pop100", "uni100"])
def test_100_negatives_need_as_many_items_that_the_user_has_not_seen(tmp_path: Path, protocol: str) -> None:
    prepare("synthetic-histories", tmp_path / "d", users=200, items=105, interactions=3000)
    fact = rf"'{protocol}' needs 100 items a user has never seen; user \d+ has seen \d+ of 105"
    with pytest.raises(DataError, match=fact):
        history_source(tmp_path / "d", protocols=[protocol])


def test_a_user_who_has_seen_too_many_is_named_as_in_the_source(tmp_path: Path) -> None:
    rows = [f"{user},{item}" for user, items in (("ann", 5), ("bob", 20)) for item in range(items)]
    rows += [f"cat {n},{item}" for n in range(10) for item in range(n * 10, n * 10 + 10)]
    (tmp_path / "own.csv").write_text("\n".join(["user,item", *rows]) + "\n")
    columns: dict[str, Any] = {"user_column": "user", "item_column": "item", "min_item_count": 0}
    prepare("histories", tmp_path / "d", input=str(tmp_path / "own.csv"), **columns)
    with pytest.raises(DataError, match="user ann has seen 5 of 100"):
        history_source(tmp_path / "d", protocols=["uni100"])


def test_pop100_is_refused_before_training_if_any_user_has_seen_too_many(tmp_path: Path) -> None:
    """Here the user with the longest history repeats items; another one has seen more different ones."""
    prepare("random-histories", tmp_path / "d", random_item_count=143, seed=2)
    with pytest.raises(
        DataError,
        match=r"user \d+ has seen \d+ of \d+\. Use --set 'eval.protocols=\[\"full\"\]' \(train\) or --protocol full",
    ):
        history_source(tmp_path / "d", protocols=["pop100"])


NEXT = WindowRules(max_length=10, step=10, probability=0.0, last_only=0.0, predicts_next=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_training_item_but_the_first_of_a_history_is_asked_for_once(histories: Path, size: int) -> None:
    found = [window for batch in history_epoch(histories, size=size, window_rules=NEXT) for window in batch]
    answers = []
    for tokens, asked, _ in found:
        items = [*tokens, dict(asked)[1]]
        assert len(tokens) <= 10
        assert [answer for _, answer in sorted(asked, reverse=True)] == items[1:]
        answers += items[1:]
    assert sorted(answers) == sorted(item for history in all_histories(histories) for item in history[1:-2])


def test_a_model_that_asks_for_the_next_item_ranks_from_the_last_one(histories: Path) -> None:
    batch = next(history_source(histories, window_rules=NEXT).eval_batches("test"))
    history = all_histories(histories)[0]
    assert batch.tokens_N[: batch.lengths_B[0]].tolist() == history[:-1][-10:]
    assert batch.answers_M[0] == history[-1]
    assert batch.queries_M[0] == batch.lengths_B[0] - 1


def test_histories_too_short_to_ask_for_a_next_item_are_refused(tmp_path: Path) -> None:
    (tmp_path / "raw.csv").write_text("who,what\na,x\na,y\na,z\n")
    options: dict[str, Any] = {"user_column": "who", "item_column": "what", "min_user_count": 0, "min_item_count": 0}
    prepare("histories", tmp_path / "d", input=tmp_path / "raw.csv", **options)
    with pytest.raises(DataError, match="no history has two items for training"):
        history_source(tmp_path / "d", window_rules=NEXT, protocols=["full"])
    assert history_source(tmp_path / "d", protocols=["full"]).samples_per_epoch == 1
