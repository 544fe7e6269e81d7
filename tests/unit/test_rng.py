import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recmill import rng

KEY = rng.stream_key(1, "test")


def test_bits_are_splitmix64() -> None:
    """Vigna's reference generator, seeded with 0."""
    assert rng.bits(np.uint64(0), np.array([1, 2, 3])).tolist() == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


def test_bits_take_one_key_per_counter() -> None:
    keys = np.array([3, 2**64 - 1, 5], dtype=np.uint64)
    counters = np.array([7, 8, 7])
    single = [int(rng.bits(key, counters[i : i + 1])[0]) for i, key in enumerate(keys)]
    assert rng.bits(keys, counters).tolist() == single


def test_counters_are_left_as_they_were() -> None:
    counters = np.arange(5, dtype=np.uint64)
    rng.bits(KEY, counters)
    rng.Permutation(5, KEY)(counters)
    assert counters.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, "order", 0), (2, "order", 0)),
        ((1, "order", 0), (1, "mask", 0)),
        ((1, "order", 0), (1, "order", 1)),
        ((1, "order", 0), (1, "order")),
        (("1", "23"), ("12", "3")),
        ((1, 23), (12, 3)),
        (("a", ""), ("", "a")),
    ],
)
def test_stream_keys_differ_by_any_part(one: tuple[int | str, ...], other: tuple[int | str, ...]) -> None:
    assert rng.stream_key(*one) != rng.stream_key(*other)
    assert rng.stream_key(*one) == rng.stream_key(*one)


def test_uniform_covers_zero_to_one_evenly() -> None:
    values = rng.uniform(KEY, np.arange(50_000))
    assert 0.0 <= values.min() < 0.001
    assert 0.999 < values.max() < 1.0
    assert np.histogram(values, bins=10, range=(0, 1))[0] == pytest.approx(np.full(10, 5000), rel=0.05)


def test_normal_has_the_moments_of_a_normal() -> None:
    values = rng.normal(KEY, np.arange(50_000))
    assert np.mean(values) == pytest.approx(0.0, abs=0.02)
    assert np.var(values) == pytest.approx(1.0, abs=0.03)
    assert np.mean(values**3) == pytest.approx(0.0, abs=0.06)
    assert np.mean(values**4) == pytest.approx(3.0, abs=0.15)


@settings(derandomize=True, deadline=None)
@given(first=st.integers(0, 300), count=st.integers(0, 300))
def test_any_slice_of_uniform_floats_equals_that_of_the_full_stream(first: int, count: int) -> None:
    full = rng.uniform_floats(KEY, 0, 600, 0.3)
    part = rng.uniform_floats(KEY, first, count, 0.3)
    assert part.dtype == np.float32
    np.testing.assert_array_equal(part, full[first : first + count])


@pytest.mark.parametrize("bound", [0.05, 0.3, 1.0, 12.7])
def test_uniform_floats_fill_their_bounds_around_zero(bound: float) -> None:
    values = rng.uniform_floats(KEY, 1, 100_000, bound) / np.float32(bound)
    assert -1.0 <= values.min() < -0.999
    assert 0.999 < values.max() < 1.0
    assert np.mean(values) == pytest.approx(0.0, abs=0.01)
    assert np.var(values) == pytest.approx(1 / 3, abs=0.01)


@settings(derandomize=True, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
def test_a_permutation_is_a_bijection(size: int, seed: int) -> None:
    order = rng.Permutation(size, np.uint64(seed))(np.arange(size))
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(size))


def test_part_of_a_permutation_needs_no_other_part() -> None:
    permutation = rng.Permutation(1000, KEY)
    np.testing.assert_array_equal(permutation(np.array([999, 3])), permutation(np.arange(1000))[[999, 3]])


def test_permutations_of_two_keys_agree_no_more_than_chance() -> None:
    one, other = (rng.Permutation(1000, rng.stream_key(seed))(np.arange(1000)) for seed in (1, 2))
    assert np.sum(one == other) < 10  # 1 expected
    assert np.sum(one == np.arange(1000)) < 10


def test_over_many_keys_every_row_comes_first_equally_often() -> None:
    first = [int(rng.Permutation(10, rng.stream_key(seed))(np.zeros(1, np.int64))[0]) for seed in range(1000)]
    assert np.bincount(first, minlength=10) == pytest.approx(np.full(10, 100), abs=45)  # 4.7 standard deviations
