"""Stands in for dlrm_main.py of mlcommons/training (recommendation_v2): the same flags, under the same launchers."""

import sys

from recmill.__main__ import main

sys.argv[:] = ["recmill", "run-like", "mlcommons/dlrm_main.py", "--", *sys.argv[1:]]
main()
