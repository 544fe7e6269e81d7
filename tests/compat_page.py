"""Write the tables of flags in docs/, from src/recmill/compat: python -m tests.compat_page"""

import re
from collections.abc import Sequence
from pathlib import Path

from recmill.compat import bert4rec_main, criteo_scripts, dlrm_main, oneflow, tdfo
from recmill.compat.program import Flag

DOCS = Path(__file__).parent.parent / "docs"
# page -> the first cell of a table's header -> its flags
PAGES: dict[str, dict[str, Sequence[Flag]]] = {
    "coming-from.md": {
        "flag of `dlrm_main.py`": dlrm_main.FLAGS,
        "flag of `npy_preproc_criteo`": criteo_scripts.NPY_FLAGS,
        "flag of `contiguous_preproc_criteo`": criteo_scripts.CONTIGUOUS_FLAGS,
        "flag of `shuffle_preproc_criteo`": criteo_scripts.SHUFFLE_FLAGS,
        "flag of `materialize_synthetic_multihot_dataset`": criteo_scripts.MULTI_HOT_FLAGS,
        "argument of `process_Criteo_1TB_Click_Logs_dataset.sh`": criteo_scripts.PROCESS_FLAGS,
        "argument of `1_split_dataset.sh`": criteo_scripts.SPLIT_FLAGS,
        "variable of `2_preprocess_dataset.sh`": criteo_scripts.PREPROCESS_VARIABLES,
        "variable of `3_train.sh`": criteo_scripts.TRAIN_VARIABLES,
        "flag of `dlrm_train_eval.py`": oneflow.FLAGS,
        "flag of `criteo1t_parquet.py`": oneflow.PARQUET_FLAGS,
    },
    "sequences.md": {"flag of `bert4rec_main.py`": bert4rec_main.FLAGS, "key of `config.toml`": tdfo.KEYS},
}


def table(title: str, flags: Sequence[Flag]) -> str:
    lines = [f"| {title} | ours | note |", "|---|---|---|"]
    for flag in flags:
        ours = flag.ours or ", ".join(f"`{key}`" for key in flag.keys.split(", "))
        note = f"{flag.note} " if flag.note else ""
        lines.append(f"| `{flag.name}` | {ours} | {note}|")
    return "\n".join(lines)


def with_current_tables(name: str, page: str) -> str:
    """Return the page with each generated table replaced by what the code says."""
    for title, flags in PAGES[name].items():
        found = re.search(rf"^\| {re.escape(title)} \|.*\n(\|.*\n)+", page, flags=re.M)
        assert found, f"docs/{name} has no table '{title}'"
        page = f"{page[: found.start()]}{table(title, flags)}\n{page[found.end() :]}"
    return page


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(with_current_tables(name, (DOCS / name).read_text(encoding="utf-8")), encoding="utf-8")
