"""Stands in for dlrm_main.py of mlcommons/training with the patch for Polaris, under the same launchers."""

import sys

from recmill.__main__ import main

sys.argv[:] = ["recmill", "run-like", "polaris/dlrm_main.py", "--", *sys.argv[1:]]
main()
