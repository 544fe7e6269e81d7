"""How far a metric may be from its true value because its split has only so many rows.

Two runs are tested on the same rows, so part of their errors cancels: the error of a difference is at most that of
independent rows. Only a bootstrap knows more.
"""

import math
import re
from collections.abc import Mapping

TWO_SIDED_95 = 1.96
_OF_USERS = re.compile(r"(.*/)?(hr|ndcg|mrr)@\d+")


def standard_error(name: str, values: Mapping[str, float | int | str]) -> float | None:
    """Return the standard error of a metric, given all metrics of its split; None: unknown.

    It is that of the metric's 95 % interval, if it has one. Otherwise a mean over n users of values from 0 to 1 has a
    variance of at most m (1 - m) / n (Bhatia and Davis, Amer. Math. Monthly 107, 2000), and that of an AUROC is
    estimated as by Hanley and McNeil (Radiology 143, 1982), who assume exponential distributions of the scores.
    """
    value, low, high = (values.get(key) for key in (name, f"low/{name}", f"high/{name}"))
    if isinstance(low, float) and isinstance(high, float):
        return (high - low) / 2 / TWO_SIDED_95
    if not isinstance(value, float) or not 0 <= value <= 1:
        return None
    count = fewer = 0.0
    if _OF_USERS.fullmatch(name):
        count = _number(values, "users")
    elif name == "auroc":
        count = fewer = _rows_of_smaller_class(values)
    if not count:
        return None
    mean = (value * count + 1) / (count + 2)  # of few users none may be a hit (Agresti and Caffo, Amer. Stat. 54, 2000)
    variance = mean * (1 - mean)
    if fewer:
        more = _number(values, "rows") - fewer
        of_fewer, of_more = mean / (2 - mean) - mean**2, 2 * mean**2 / (1 + mean) - mean**2
        variance = (variance + (fewer - 1) * of_fewer + (more - 1) * of_more) / more
    return math.sqrt(variance / (count + 2))


def _rows_of_smaller_class(values: Mapping[str, float | int | str]) -> float:
    """Return how many rows are clicks, or are none, whichever are fewer; 0: unknown.

    Normalised entropy is the log loss divided by the entropy of the click rate, which is the same for 1 - rate.
    """
    loss, normalised = _number(values, "logloss"), _number(values, "normalised_entropy")
    entropy = loss / normalised if normalised else 0.0
    low, high = 0.0, 0.5
    for _ in range(50):
        rate = (low + high) / 2
        is_low = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) < entropy
        low, high = (rate, high) if is_low else (low, rate)
    return _number(values, "rows") * low


def _number(values: Mapping[str, float | int | str], name: str) -> float:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
