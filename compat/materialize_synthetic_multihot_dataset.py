"""Stands in for materialize_synthetic_multihot_dataset.py of facebookresearch/dlrm: the same flags."""

import sys

from recmill.__main__ import main

sys.argv[:] = ["recmill", "run-like", "materialize_synthetic_multihot_dataset.py", "--", *sys.argv[1:]]
main()
