"""Users and items by the names that people give them: original ids, and titles of items."""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recmill.errors import DataError

_COMPARED = 100_000  # names: difflib takes seconds for as many
_SUGGESTED, _LISTED = 3, 5


class Names:
    """Of a prepared dataset's users or items. A row is a place in the order of our ids."""

    def __init__(self, file: Path, what: str) -> None:
        import polars as pl

        self._file, self._what = file, what
        names = pl.read_parquet(file).sort("id")
        self.originals: Any = names["original_id"]
        self.titles: Any = names["title"] if "title" in names.columns else self.originals

    def find(self, names: str | Sequence[str | int], flag: str) -> list[int]:
        """The row of each name: an original id, or else a title. In a text commas are between names, or within them."""
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
                ids = ", ".join(self.originals[row] for row in rows[name][:_LISTED])
                fact = f"'{name}' is the title of {len(rows[name])} {self._what}s"
                raise DataError(f"{flag}: {fact}. Use the id of one: {ids}{' ...' * (len(rows[name]) > _LISTED)}.")
        return [rows[name][0] for name in wanted]

    def _unknown(self, missing: list[str], known: dict[str, list[int]], flag: str) -> str:
        columns = "column original_id" if self.titles is self.originals else "columns original_id and title"
        told = []
        for name in missing[:_LISTED]:
            near = " or ".join(f"'{one}'" for one in _near(name, list(known)))
            told.append(f"'{name}' (did you mean {near}?)" if near else f"'{name}'")
        more = " and more" if len(self.originals) > _SUGGESTED else ""
        return (
            f"{flag}: {len(missing)} {self._what}(s) are not in {self._file}, {columns}: {', '.join(told)}. "
            f"Known ids: {', '.join(self.originals[:_SUGGESTED])}{more}."
        )


def _parts(text: str, known: dict[str, list[int]]) -> Iterator[str]:
    """Always the longest known name that comes next, else what is before the next comma."""
    most = 1 + max((name.count(",") for name in known), default=0)
    pieces = text.split(",")
    while pieces:
        for length in range(min(most, len(pieces)), 0, -1):
            name = ",".join(pieces[:length]).strip()
            if name in known:
                break
        if name:
            yield name
        pieces = pieces[length:]


def _near(name: str, known: list[str]) -> list[str]:
    """Names that contain this one, the shortest first, and then those that look like it."""
    wanted = name.casefold()
    by_fold = {one.casefold(): one for one in known}
    containing = sorted((one for one in by_fold if wanted in one), key=len)
    pool = list(by_fold) if len(by_fold) <= _COMPARED else [one for one in by_fold if one[:2] == wanted[:2]][:_COMPARED]
    alike = difflib.get_close_matches(wanted, pool, n=_SUGGESTED, cutoff=0.6)
    return [by_fold[one] for one in dict.fromkeys([*containing, *alike])][:_SUGGESTED]
