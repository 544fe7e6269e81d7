"""AUROC over real processes against scikit-learn's of all scores together."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from recmill.metrics.auc import auroc_over_ranks
from recmill.world import World, joined_world

from ..group import in_group


def cases() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Every rank makes all cases and takes its slice of the rows."""
    generator = np.random.default_rng(11)
    normal = generator.normal(size=30_011).astype(np.float32)
    clicks = generator.random(30_011) < 1 / (1 + np.exp(2 - normal))
    rare = np.zeros(30_011, bool)
    rare[7] = True
    few = np.array([0.5, 0.5, -1.0], np.float32)
    return {
        "no ties": (normal, clicks),
        "heavy ties": (np.round(normal), clicks),
        "all equal": (np.zeros_like(normal), clicks),
        "one score for nearly all": (np.where(generator.random(30_011) < 0.99, 3, normal).astype(np.float32), clicks),
        "skewed by rank": (np.sort(normal), clicks[np.argsort(normal)]),
        "skewed by size": (np.exp(normal * 15), clicks),
        "one click": (normal, rare),
        "fewer rows than ranks have samples": (few, np.array([True, False, False])),
        "one row": (few[:1], np.array([True])),
        "one class": (normal, np.ones_like(clicks)),
        "none": (few[:0], np.empty(0, bool)),
    }


class Watched(World):
    """Asserts that no process gets many more entries than its share, which bounds its memory."""

    def exchange(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        received = super().exchange(parts)
        (entries,) = self.sum([float(sum(map(len, parts)))])
        assert sum(map(len, received)) <= 1.1 * entries / self.size + self.size
        return received


def measure() -> list[dict[str, float | None]] | None:
    """Return the values that each rank found."""
    with joined_world("cpu") as joined:
        world = Watched(**vars(joined))
        found = {}
        for name, (scores, labels) in cases().items():
            low, high = (len(scores) * part // world.size for part in (world.rank, world.rank + 1))
            found[name] = auroc_over_ranks(scores[low:high], labels[low:high], world)
        return world.gather(found)


@pytest.mark.parametrize("size", [1, 3])
def test_auroc_over_ranks_equals_scikit_learns_of_all_scores(size: int) -> None:
    found = in_group(size, measure)
    assert len(found) == size
    assert all(values == found[0] for values in found), "the same on every rank"
    for name, (scores, labels) in cases().items():
        if len(set(labels.tolist())) < 2:
            assert found[0][name] is None, name
        else:
            assert found[0][name] == pytest.approx(roc_auc_score(labels, scores.astype(np.float64)), abs=1e-12), name
