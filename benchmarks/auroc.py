"""Time the AUROC of 10 million predictions: ours and scikit-learn's, on the same arrays in one process."""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from sklearn.metrics import roc_auc_score

from recmill.metrics.auc import auroc


def best_seconds(work: Callable[[], float | None], repeats: int) -> tuple[float, float | None]:
    seconds, value = [], None
    for _ in range(repeats):
        started = time.perf_counter()
        value = work()
        seconds.append(time.perf_counter() - started)
    return min(seconds), value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    generator = np.random.default_rng(1)
    result: dict[str, float | int] = {"rows": options.rows}
    for name, decimals in (("distinct", 9), ("tied", 2)):
        scores = np.round(generator.normal(-3, 1, options.rows), decimals).astype(np.float32)
        labels = generator.random(options.rows) < 1 / (1 + np.exp(-scores))
        ours, our_value = best_seconds(lambda s=scores, y=labels: auroc(s, y), options.repeats)  # type: ignore[misc]
        theirs, their_value = best_seconds(lambda s=scores, y=labels: float(roc_auc_score(y, s)), options.repeats)  # type: ignore[misc]
        assert our_value is not None
        assert their_value is not None
        assert abs(our_value - their_value) < 1e-9
        print(f"{name}: recmill {ours:.2f} s, scikit-learn {theirs:.2f} s, both {our_value:.6f}")
        result |= {f"{name}_ours_s": ours, f"{name}_sklearn_s": theirs, f"{name}_times_faster": theirs / ours}
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
