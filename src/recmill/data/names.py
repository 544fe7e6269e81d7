"""Find users and items of a prepared dataset by their original ids or titles."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recmill.errors import DataError

_MAX_COMPARED = 100_000  # difflib takes seconds for this many names
_MAX_SUGGESTED = 3
_MAX_LISTED = 5


class Names:
    """The names of a prepared dataset's users or items. Row N belongs to the N-th smallest of our ids."""

    def __init__(self, file: Path, what: str) -> None:
        import polars as pl

        self._file = file
        self._what = what
        names = pl.read_parquet(file).sort("id")
        self.originals: Any = names["original_id"]
        self.titles: Any = names["title"] if "title" in names.columns else self.originals

    def find(self, names: str | Sequence[str | int], flag: str) -> list[int]:
        """Return the row of each name, which is an original id or a title; raise a DataError that names `flag`.

        A single string is split at commas, except where a known name has a comma in it.
        """
        rows_by_id = {name: [row] for row, name in enumerate(self.originals.to_list())}
        rows: dict[str, list[int]] = {}
        for row, title in enumerate(self.titles.to_list()):
            rows.setdefault(title, []).append(row)
        rows |= rows_by_id
        wanted = list(_parts(names, rows)) if isinstance(names, str) else [str(name) for name in names]
        if not wanted:
            raise DataError(f"{flag} is empty: name at least one {self._what}.")
        if missing := list(dict.fromkeys(name for name in wanted if name not in rows)):
            raise DataError(self._unknown(missing, rows, flag))
        for name in wanted:
            if len(rows[name]) > 1:
                ids = ", ".join(self.originals[row] for row in rows[name][:_MAX_LISTED])
                fact = f"'{name}' is the title of {len(rows[name])} {self._what}s"
                raise DataError(f"{flag}: {fact}. Use the id of one: {ids}{' ...' * (len(rows[name]) > _MAX_LISTED)}.")
        return [rows[name][0] for name in wanted]

    def _unknown(self, missing: list[str], known: dict[str, list[int]], flag: str) -> str:
        columns = "column original_id" if self.titles is self.originals else "columns original_id and title"
        named = []
        for name in missing[:_MAX_LISTED]:
            near = " or ".join(f"'{one}'" for one in _near(name, list(known)))
            named.append(f"'{name}' (did you mean {near}?)" if near else f"'{name}'")
        more = " and more" if len(self.originals) > _MAX_SUGGESTED else ""
        return (
            f"{flag}: {len(missing)} {self._what}(s) are not in {self._file}, {columns}: {', '.join(named)}. "
            f"Known ids: {', '.join(self.originals[:_MAX_SUGGESTED])}{more}."
        )


def _parts(text: str, known: dict[str, list[int]]) -> Iterator[str]:
    """Split at commas: yield the longest known name that comes next, or else the text before the next comma."""
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


def _near(name: str, known: list[str]) -> list[str]:
    """Return known names that contain this one, the shortest first, then names that look like it."""
    wanted = name.casefold()
    by_fold = {one.casefold(): one for one in known}
    containing = sorted((one for one in by_fold if wanted in one), key=len)
    pool = (
        list(by_fold)
        if len(by_fold) <= _MAX_COMPARED
        else [one for one in by_fold if one[:2] == wanted[:2]][:_MAX_COMPARED]
    )
    alike = difflib.get_close_matches(wanted, pool, n=_MAX_SUGGESTED, cutoff=0.6)
    return [by_fold[one] for one in dict.fromkeys([*containing, *alike])][:_MAX_SUGGESTED]
