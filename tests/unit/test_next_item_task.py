import numpy as np
import pytest
import torch

from recmill.batch import RankingBatch
from recmill.config.sections import EvalSection
from recmill.tasks import next_item
from recmill.world import World

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
NAN = float("nan")


def ranking_batch(
    answers: list[int], seen: list[list[int]], negatives: list[list[int]], weights: list[float] | None = None
) -> RankingBatch:
    rows = len(answers)
    return RankingBatch(
        tokens_N=torch.full((rows,), 21),
        lengths_B=torch.ones(rows, dtype=torch.int64),
        longest=1,
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

    By popularity the target ties with item 4, behind 1 and 2. Negatives of `pop2` come before those of `uni2`.
    """
    counts = np.array([9, 8, 3, 3, 1])
    section = EvalSection(protocols=["uni2", "full", "pop2"], ks=[1, 2])
    metrics = next_item.new_metrics(section, train_counts=counts)
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0], [5.0, 4.0, 3.0, 3.0, 1.0], [9.0, 0.0, 0.0, 0.0, 0.0]])
    batch = ranking_batch([3, 3, 1], [[1], [], []], [[4, 5, 1, 2], [4, 5, 1, 5], [4, 5, 2, 3]], weights=[1.0, 1.0, 0.0])
    next_item.update(metrics, logits, batch)
    values = metrics.compute(ALONE)
    assert values == {
        "uni2/hr@1": 0.0,  # behind 1 and 2; behind 1
        "uni2/hr@2": 0.5,
        "uni2/ndcg@1": 0.0,
        "uni2/ndcg@2": pytest.approx(0.5 / np.log2(3)),
        "uni2/mrr@1": 0.0,
        "uni2/mrr@2": 0.25,
        "full/hr@1": 0.0,
        "full/hr@2": 0.5,
        "full/ndcg@1": 0.0,
        "full/ndcg@2": pytest.approx(0.5 / np.log2(3)),
        "full/mrr@1": 0.0,
        "full/mrr@2": 0.25,
        "pop2/hr@1": 0.5,
        "pop2/hr@2": 1.0,
        "pop2/ndcg@1": 0.5,
        "pop2/ndcg@2": pytest.approx((1 + 1 / np.log2(3)) / 2),
        "pop2/mrr@1": 0.5,
        "pop2/mrr@2": 0.75,
        "users": 2,
        "popularity/uni2/hr@1": 0.0,
        "popularity/uni2/hr@2": 0.5,
        "popularity/uni2/ndcg@1": 0.0,
        "popularity/uni2/ndcg@2": pytest.approx(0.5 / np.log2(3)),
        "popularity/uni2/mrr@1": 0.0,
        "popularity/uni2/mrr@2": 0.25,
        "popularity/full/hr@1": 0.0,  # behind 2 and 4; behind 1, 2 and 4
        "popularity/full/hr@2": 0.0,
        "popularity/full/ndcg@1": 0.0,
        "popularity/full/ndcg@2": 0.0,
        "popularity/full/mrr@1": 0.0,
        "popularity/full/mrr@2": 0.0,
        "popularity/pop2/hr@1": 0.0,  # both behind 4
        "popularity/pop2/hr@2": 1.0,
        "popularity/pop2/ndcg@1": 0.0,
        "popularity/pop2/ndcg@2": pytest.approx(1 / np.log2(3)),
        "popularity/pop2/mrr@1": 0.0,
        "popularity/pop2/mrr@2": 0.5,
    }
    assert next_item.headline(values) == "uni2/ndcg@2"


def test_a_nan_target_comes_last_among_the_negatives() -> None:
    metrics = next_item.new_metrics(EvalSection(protocols=["pop2"], ks=[2, 3]))
    next_item.update(metrics, torch.tensor([[0.0, NAN, 0.0]]), ranking_batch([2], [[]], [[1, 3]]))
    values = metrics.compute(ALONE)
    assert (values["pop2/hr@2"], values["pop2/hr@3"]) == (0.0, 1.0)
