"""Stands in for bert4rec_main.py of TorchRec's examples (bert4rec): the same flags, under the same launchers."""

import sys

from recmill.__main__ import main

sys.argv[:] = ["recmill", "run-like", "bert4rec_main.py", "--", *sys.argv[1:]]
main()
