"""Find users and items of a prepared dataset by their original ids or titles."""

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from recmill.data.parquet_files import reading
from recmill.errors import ConfigError, DataError

Unknown = Literal["error", "skip"]  # what becomes of names that are unknown
_MIN_SIMILARITY = 0.8  # of difflib: one letter of five, or two of ten
_NO_NUMBER = r"(?:(?<!\d)|(?!\d))"  # a place that is not within a number
_MAX_COMPARED = 100_000  # difflib takes seconds for this many names
_MAX_SUGGESTED = 3
_MAX_LISTED = 5


class Names:
    """The names of a prepared dataset's users or items, in the order of our ids."""

    def __init__(self, file: Path, what: str) -> None:
        import polars as pl

        self._file = file
        self._what = what
        with reading(file):
            names = pl.read_parquet(file, glob=False).sort("id")
            self.originals: Any = names["original_id"]
        self.titles: Any = names["title"] if "title" in names.columns else self.originals

    def find(self, names: str | Sequence[str | int], flag: str, unknown: Unknown = "error") -> list[int]:
        """Return the row of each name (an original id or a title). A string is split at commas outside of names.

        `unknown`: names that the dataset does not have are an error, or left out ("skip").
        """
        if not isinstance(names, Iterable):
            raise ConfigError(f"{flag}: expected a list or a text, got {names!r}.")
        wanted = self.split(names) if isinstance(names, str) else [str(name) for name in names]
        if not wanted and unknown == "error":
            raise DataError(f"{flag} is empty: name at least one {self._what}.")
        missing = list(dict.fromkeys(name for name in wanted if name not in self._rows))
        if missing and unknown == "error":
            raise DataError(self._unknown(missing, self._rows, flag))
        try:
            return [self.row_of(name) for name in wanted if name in self._rows]
        except DataError as error:
            raise DataError(f"{flag}: {error}") from None

    def row_of(self, name: str) -> int:
        """Return the row of a name, -1 if it is unknown; raise DataError if it is a title of several."""
        rows = self._rows.get(name, [-1])
        if len(rows) == 1:
            return rows[0]
        ids = ", ".join(self.originals[row] for row in rows[:_MAX_LISTED])
        fact = f"{name!r} is the title of {len(rows)} {self._what}s"
        raise DataError(f"{fact}. Use the id of one: {ids}{' ...' * (len(rows) > _MAX_LISTED)}.")

    def split(self, text: str) -> list[str]:
        """Split at commas outside of names: the longest known name that comes next, else up to the next comma."""
        found = []
        words = text.split(",")
        while words:
            for length in range(min(self._max_words, len(words)), 0, -1):
                name = ",".join(words[:length]).strip()
                if name in self._rows:
                    break
            if name:
                found.append(name)
            words = words[length:]
        return found

    @cached_property
    def _max_words(self) -> int:
        return 1 + max((name.count(",") for name in self._rows), default=0)

    @cached_property
    def _rows(self) -> dict[str, list[int]]:
        """The rows of each name: one of an original id, perhaps several of a title."""
        rows: dict[str, list[int]] = {}
        for row, title in enumerate(self.titles.to_list()):
            rows.setdefault(title, []).append(row)
        return rows | {name: [row] for row, name in enumerate(self.originals.to_list())}

    def _unknown(self, missing: list[str], known: dict[str, list[int]], flag: str) -> str:
        columns = "column original_id" if self.titles is self.originals else "columns original_id and title"
        named = []
        for name in missing[:_MAX_LISTED]:
            similar = " or ".join(f"{other!r}" for other in _similar(name, list(known)))
            named.append(f"{name!r} (did you mean {similar}?)" if similar else f"{name!r}")
        more = " and more" if len(self.originals) > _MAX_SUGGESTED else ""
        return (
            f"{flag}: {len(missing)} {self._what}(s) are not in {self._file}, {columns}: {', '.join(named)}. "
            f"Known ids: {', '.join(self.originals[:_MAX_SUGGESTED])}{more}."
        )


def _similar(name: str, known: list[str]) -> list[str]:
    """Return known names that differ only in leading zeros; without any, names that contain this one or resemble it.

    A number does not count as a part of one with more digits.
    """
    plain = _without_zeros(name)
    if same := [other for other in known if _without_zeros(other) == plain]:
        return same[:_MAX_SUGGESTED]
    wanted = name.casefold()
    by_fold = {other.casefold(): other for other in known}
    part = re.compile(_NO_NUMBER + re.escape(wanted) + _NO_NUMBER)
    containing = sorted((other for other in by_fold if part.search(other)), key=len)
    compared = list(by_fold)
    if len(compared) > _MAX_COMPARED:
        compared = [other for other in compared if other[:2] == wanted[:2]][:_MAX_COMPARED]
    alike = difflib.get_close_matches(wanted, compared, n=_MAX_SUGGESTED, cutoff=_MIN_SIMILARITY)
    return [by_fold[other] for other in dict.fromkeys([*containing, *alike])][:_MAX_SUGGESTED]


def _without_zeros(name: str) -> str:
    """Return the name in lower case, without zeros that its numbers begin with."""
    return re.sub(r"(?<!\d)0+(?=\d)", "", name.casefold())
