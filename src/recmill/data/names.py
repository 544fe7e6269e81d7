"""Find users and items of a prepared dataset by their original ids or titles."""

import difflib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from recmill.data.parquet_files import reading
from recmill.errors import DataError

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
            names = pl.read_parquet(file).sort("id")
            self.originals: Any = names["original_id"]
        self.titles: Any = names["title"] if "title" in names.columns else self.originals

    def find(self, names: str | Sequence[str | int], flag: str) -> list[int]:
        """Return the row of each name (an original id or a title). A string is split at commas outside of names."""
        rows = self._rows
        wanted = list(_parts(names, rows)) if isinstance(names, str) else [str(name) for name in names]
        if not wanted:
            raise DataError(f"{flag} is empty: name at least one {self._what}.")
        if missing := list(dict.fromkeys(name for name in wanted if name not in rows)):
            raise DataError(self._unknown(missing, rows, flag))
        for name in wanted:
            if len(rows[name]) > 1:
                ids = ", ".join(self.originals[row] for row in rows[name][:_MAX_LISTED])
                fact = f"{name!r} is the title of {len(rows[name])} {self._what}s"
                raise DataError(f"{flag}: {fact}. Use the id of one: {ids}{' ...' * (len(rows[name]) > _MAX_LISTED)}.")
        return [rows[name][0] for name in wanted]

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


def _parts(text: str, known: dict[str, list[int]]) -> Iterator[str]:
    """Split at commas: yield the longest known name that comes next, else the text before the next comma."""
    max_length = 1 + max((name.count(",") for name in known), default=0)
    words = text.split(",")
    while words:
        for length in range(min(max_length, len(words)), 0, -1):
            name = ",".join(words[:length]).strip()
            if name in known:
                break
        if name:
            yield name
        words = words[length:]


def _similar(name: str, known: list[str]) -> list[str]:
    """Return known names that contain this one, the shortest first, then names that look like it."""
    wanted = name.casefold()
    by_fold = {other.casefold(): other for other in known}
    containing = sorted((other for other in by_fold if wanted in other), key=len)
    compared = list(by_fold)
    if len(compared) > _MAX_COMPARED:
        compared = [other for other in compared if other[:2] == wanted[:2]][:_MAX_COMPARED]
    alike = difflib.get_close_matches(wanted, compared, n=_MAX_SUGGESTED)
    return [by_fold[other] for other in dict.fromkeys([*containing, *alike])][:_MAX_SUGGESTED]
