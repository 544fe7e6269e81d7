"""Stands in for dlrm_train_eval.py of OneFlow's DLRM: the same flags, under the same launcher."""

import sys

from recmill.__main__ import main

sys.argv[:] = ["recmill", "run-like", "dlrm_train_eval.py", "--", *sys.argv[1:]]
main()
