"""Programs of other systems whose command lines `recmill run-like` understands.

A program is a `Program` (program.py): its flags as data, and a function that makes a `Plan` of their values. To add
one:

1. Write a module here with a tuple of `Flag` and `PROGRAM = Program(...)`. A flag whose value is the value of config
   keys names these `keys`, and `Given.config()` sets them; `plan` does the rest and returns the steps to run. `ours`
   and `note` are what the table of flags in docs/ says. `default` is theirs: the same command must mean the same.
2. Add a line to `PROGRAMS` below, and a file to compat/ of the repository that can stand in for their script. A program
   that reads a file instead of flags is a subclass of `Program` with its own `read`.
3. Add its tables to `PAGES` in tests/compat_page.py and run `python -m tests.compat_page`, which writes them to docs/.
4. Add its flags with their defaults to tests/contracts/their_flags.toml, which is written independently of this
   package, and each command of its README to tests/end_to_end/test_their_commands.py.
"""

import importlib

from recmill.compat.program import Program
from recmill.errors import ConfigError
from recmill.registry import unknown

# name -> module: attribute
PROGRAMS = {
    "dlrm_main.py": "dlrm_main:TORCHREC",
    "mlcommons/dlrm_main.py": "dlrm_main:MLCOMMONS",
    "polaris/dlrm_main.py": "dlrm_main:POLARIS",
    "npy_preproc_criteo.py": "criteo_scripts:NPY",
    "contiguous_preproc_criteo.py": "criteo_scripts:CONTIGUOUS",
    "shuffle_preproc_criteo.py": "criteo_scripts:SHUFFLE",
    "materialize_synthetic_multihot_dataset.py": "criteo_scripts:MULTI_HOT",
    "process_Criteo_1TB_Click_Logs_dataset.sh": "criteo_scripts:PROCESS",
    "1_split_dataset.sh": "criteo_scripts:POLARIS_SPLIT",
    "2_preprocess_dataset.sh": "criteo_scripts:POLARIS_PREPROCESS",
    "3_train.sh": "criteo_scripts:POLARIS_TRAIN",
    "bert4rec_main.py": "bert4rec_main:PROGRAM",
    "tdfo/preprocessing.py": "tdfo:PREPROCESSING",
    "tdfo/train.py": "tdfo:TRAIN",
    "dlrm_train_eval.py": "oneflow:TRAIN",
    "criteo1t_parquet.py": "oneflow:PARQUET",
}


def find_program(name: str) -> Program:
    """Return the program of this name, with or without ./ and its suffix (.py, .sh)."""
    places = {_bare(full): place for full, place in PROGRAMS.items()}
    name = _bare(name)
    if name not in places:
        raise ConfigError(unknown("program", name, places))
    module, _, attribute = places[name].partition(":")
    found: Program = getattr(importlib.import_module(f"recmill.compat.{module}"), attribute)
    return found


def _bare(name: str) -> str:
    return name.removeprefix("./").removesuffix(".py").removesuffix(".sh")
