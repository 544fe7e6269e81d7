"""Stands in for preprocessing.py of tdfo (torchrec): the same config.toml, under the same launchers."""

import sys

from recmill.__main__ import main

sys.argv[:] = ["recmill", "run-like", "tdfo/preprocessing.py", "--", *sys.argv[1:]]
main()
