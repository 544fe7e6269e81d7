"""Stands in for contiguous_preproc_criteo.py of TorchRec (torchrec.datasets.scripts): the same flags."""

import sys

from recmill.__main__ import main

sys.argv[:] = ["recmill", "run-like", "contiguous_preproc_criteo.py", "--", *sys.argv[1:]]
main()
