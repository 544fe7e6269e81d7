"""A key table must behave like dictionaries of counts, rows and last batches, however it is divided or swept."""

import numpy as np
import pytest

from recmill import rng
from recmill.errors import ResourceError
from recmill.tables.spec import Dynamic
from recmill.tables.stores.key_table import (
    KEYS_PER_SHARED_ROW,
    Entries,
    KeyTable,
    index_bytes,
    keys_per_part,
    shard_keys,
)

SEED = 5


class Reference:
    """The rules in plain Python. Each occurrence is answered with the life of its row: (key, batch of admission)."""

    def __init__(self, rules: Dynamic) -> None:
        self.rules, self.clock = rules, 0
        self.counts: dict[int, int] = {}
        self.lasts: dict[int, int] = {}
        self.admitted: dict[int, int] = {}

    def train(self, keys: list[int]) -> list[tuple[str, int, int]]:
        for key in dict.fromkeys(keys):
            if self.is_expired(key):
                for known in (self.counts, self.lasts, self.admitted):
                    known.pop(key, None)
            self.counts[key] = self.counts.get(key, 0) + keys.count(key)
            self.lasts[key] = self.clock
            if key not in self.admitted and self.admits(key):
                self.admitted[key] = self.clock
        self.clock += 1
        return [self.row_of(key) for key in keys]

    def is_expired(self, key: int) -> bool:
        limit = self.rules.expire_after_steps
        return limit > 0 and key in self.lasts and self.clock - self.lasts[key] >= limit

    def admits(self, key: int) -> bool:
        if self.rules.admit_probability < 1:
            stream = rng.bits(rng.stream_key(SEED, "admission", "C"), np.array([key]))
            return bool(rng.uniform(stream, np.array([self.clock]))[0] < self.rules.admit_probability)
        return self.counts[key] >= self.rules.min_count

    def row_of(self, key: int) -> tuple[str, int, int]:
        if key in self.admitted and not self.is_expired(key):
            return "own", key, self.admitted[key]
        return "shared", key // KEYS_PER_SHARED_ROW, 0


class Divided:
    """Tables of all parts together, which answer like the reference. Rows that are given away are forgotten here."""

    def __init__(self, rules: Dynamic, parts: int) -> None:
        self.tables = [KeyTable(shard_keys("C", rules, part, parts), rules, SEED) for part in range(parts)]
        self.block = keys_per_part(parts)
        self.lives: dict[tuple[int, int], tuple[str, int, int]] = {}

    def answers(self, keys: np.ndarray, method: str) -> list[tuple[str, int, int]]:
        out: list[tuple[str, int, int]] = [("", 0, 0)] * len(keys)
        for part, table in enumerate(self.tables):
            own = np.flatnonzero(keys // self.block == part)
            clock = table.clock
            if method == "train":
                rows, new_keys, new_rows = table.train(keys[own] - table.shard.first_key)
                for key, row in zip(new_keys.tolist(), new_rows.tolist(), strict=True):
                    self.lives[part, row] = "own", key, clock
            else:
                rows = table.find(keys[own] - table.shard.first_key)
            for at, row in zip(own.tolist(), rows.tolist(), strict=True):
                first_shared = table.shard.first_key // KEYS_PER_SHARED_ROW
                out[at] = self.lives[part, row] if row >= table.shard.shared_rows else ("shared", first_shared + row, 0)
        return out

    def moved_to(self, parts: int) -> "Divided":
        """Return the same keys in another number of parts, as a checkpoint carries them."""
        rules = self.tables[0].rules
        moved = Divided(rules, parts)
        parts_of_entries = [table.entries() for table in self.tables]
        entries = Entries(*(np.concatenate(columns) for columns in zip(*parts_of_entries, strict=True)))
        lives = {life[1]: life for life in self.lives.values()} | {
            self.lives[part, row][1]: self.lives[part, row]
            for part, own in enumerate(parts_of_entries)
            for row in own.rows.tolist()
            if row >= 0
        }
        for part, table in enumerate(moved.tables):
            table.load(entries, self.tables[0].clock)
            own = table.entries()
            for key, row in zip(own.keys.tolist(), own.rows.tolist(), strict=True):
                if row >= 0:
                    moved.lives[part, row] = lives[key]
        return moved


RULES = [
    Dynamic(400),
    Dynamic(400, min_count=3),
    Dynamic(400, admit_probability=0.3),
    Dynamic(400, min_count=2, expire_after_steps=4),
    Dynamic(400, admit_probability=0.5, expire_after_steps=3),
]


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: repr(rules).removeprefix("Dynamic"))
def test_admission_and_expiry_follow_the_rules_for_any_number_of_parts_and_after_moves(rules: Dynamic) -> None:
    random = np.random.default_rng(1)
    ids = (2**62 * random.random(200)).astype(np.int64)
    reference, alone = Reference(rules), Divided(rules, 1)
    moving = Divided(rules, 1)
    for batch, parts in enumerate([1, 1, 3, 3, 2, 2, 2, 7, 1, 1, 3, 3]):
        if len(moving.tables) != parts:
            moving = moving.moved_to(parts)
        keys = rng.keys_of_ids(ids[(200 * random.random(40) ** 2).astype(int)])
        expected = reference.train(keys.tolist())
        assert alone.answers(keys, "train") == expected, batch
        assert moving.answers(keys, "train") == expected, batch
        everything = rng.keys_of_ids(ids)
        expected = [reference.row_of(key) for key in everything.tolist()]
        assert alone.answers(everything, "find") == expected
        assert moving.answers(everything, "find") == expected
    known = {key for key in reference.counts if not reference.is_expired(key)}
    if rules.admit_probability == 1:
        entries = alone.tables[0].entries()
        assert dict(zip(entries.keys.tolist(), entries.counts.tolist(), strict=True)) == {
            key: reference.counts[key] for key in known
        }
    facts = alone.tables[0].facts()
    assert facts.admitted - facts.expired == facts.rows
    alone.tables[0].load(alone.tables[0].entries(), alone.tables[0].clock)  # replaces everything
    assert alone.tables[0].facts().rows == sum(kind == "own" for kind, *_ in expected)
    assert facts.admitted >= len(reference.admitted)


@pytest.mark.parametrize("pause", [3, 4, 5])
def test_an_id_expires_exactly_after_the_given_number_of_batches(pause: int) -> None:
    table = KeyTable(shard_keys("C", Dynamic(10, expire_after_steps=4), 0, 1), Dynamic(10, expire_after_steps=4), SEED)
    table.clock = 1  # so that the sweep at batch 4 is not where it expires
    key, other = np.array([77]), np.array([2**60])
    (row,), _, _ = table.train(key)
    for _ in range(pause - 1):
        table.train(other)
    assert table.find(key, only_own=True)[0] == (row if pause < 4 else -1)
    _, new_keys, _ = table.train(key)
    assert new_keys.tolist() == ([] if pause < 4 else [77])


def test_rows_of_expired_ids_are_used_again_before_the_table_is_full() -> None:
    rules = Dynamic(3, expire_after_steps=100)
    table = KeyTable(shard_keys("C", rules, 0, 1), rules, SEED)
    table.train(np.array([1, 2, 3]))
    table.clock = 150  # no sweep happens here
    rows, new_keys, new_rows = table.train(np.array([4, 5, 1]))
    assert sorted(rows.tolist()) == sorted(new_rows.tolist()) == [1024, 1025, 1026]
    assert sorted(new_keys.tolist()) == [1, 4, 5]
    with pytest.raises(ResourceError, match=r"more than 3 ids that have a row on a process\. Raise max_rows"):
        table.train(np.array([6]))


def test_waiting_ids_are_limited_too() -> None:
    rules = Dynamic(2, min_count=5)
    table = KeyTable(shard_keys("C", rules, 0, 1), rules, SEED)
    table.train(np.arange(8))
    with pytest.raises(ResourceError, match="more than 8 ids that have a row or wait for one"):
        table.train(np.array([8]))


def test_a_million_new_ids_in_one_batch_get_a_row_each_within_the_memory_that_is_announced() -> None:
    rules = Dynamic(1_000_000)
    shard = shard_keys("C", rules, 0, 1)
    table = KeyTable(shard, rules, SEED)
    rows, _, new_rows = table.train(rng.keys_of_ids(np.arange(1_000_000)))
    assert len(np.unique(rows)) == len(new_rows) == table.facts().rows == 1_000_000
    assert table.facts().bytes <= index_bytes(shard, rules)


def test_keys_are_a_permutation_of_ids_that_gives_ids_back() -> None:
    ids = np.array([0, 1, 2, 2**31, 2**61 + 5, 2**62 - 1])
    keys = rng.keys_of_ids(ids)
    assert rng.ids_of_keys(keys).tolist() == ids.tolist()
    assert keys.min() >= 0 and keys.max() < 2**62
    shares = np.bincount(rng.keys_of_ids(np.arange(30_000)) // keys_per_part(3))
    assert (abs(shares - 10_000) < 400).all()


def test_keys_outside_the_shard_are_errors() -> None:
    table = KeyTable(shard_keys("C", Dynamic(9), 1, 2), Dynamic(9), SEED)
    for bad in (-1, keys_per_part(2)):
        with pytest.raises(IndexError):
            table.train(np.array([bad]))
        with pytest.raises(IndexError):
            table.find(np.array([bad]))


@pytest.mark.parametrize("dim", [1, 4, 7])
def test_first_values_are_functions_of_seed_table_key_and_column(dim: int) -> None:
    table = KeyTable(shard_keys("C", Dynamic(9), 0, 1), Dynamic(9), SEED)
    keys = np.array([0, 3, 2**62 - 1])
    stream = rng.stream_key(SEED, "table", "C")
    expected = [rng.uniform_floats(rng.bits(stream, np.array([key]))[0], 0, dim, 0.25) for key in keys]
    assert table.first_values(keys, dim, 0.25).tobytes() == np.stack(expected).tobytes()
