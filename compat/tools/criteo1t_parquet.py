"""Stands in for tools/criteo1t_parquet.py of OneFlow's DLRM: the same flags, without Spark."""

import sys

from recmill.__main__ import main

sys.argv[:] = ["recmill", "run-like", "criteo1t_parquet.py", "--", *sys.argv[1:]]
main()
