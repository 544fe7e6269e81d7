"""Stands in for dlrm_main.py of facebookresearch/dlrm (torchrec_dlrm): the same flags, under the same launchers."""

import sys

from recmill.__main__ import main

sys.argv[:] = ["recmill", "run-like", "dlrm_main.py", "--", *sys.argv[1:]]
main()
