"""Stands in for `python -m oneflow.distributed.launch`, with compat/ in PYTHONPATH: starts the same with torchrun."""

import argparse
import os
import sys


def main() -> None:
    parser = argparse.ArgumentParser(prog="oneflow.distributed.launch", allow_abbrev=False)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--nproc_per_node", type=int, default=1)
    parser.add_argument("--master_addr", default="127.0.0.1")
    parser.add_argument("--master_port", type=int, default=29500)
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("--no_python", action="store_true")
    parser.add_argument("--logdir")
    parser.add_argument("--redirect_stdout_and_stderr", action="store_true")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    words = [f"--nproc_per_node={given.nproc_per_node}"]
    if given.nnodes == 1:
        words.append("--standalone")  # on any free port, so that two jobs can run on one machine
    else:
        names = ("nnodes", "node_rank", "master_addr", "master_port")
        words += [f"--{name}={getattr(given, name)}" for name in names]
    words += [f"--{name}" for name in ("module", "no_python") if getattr(given, name)]
    words += [f"--log_dir={given.logdir}"] if given.logdir else []
    words += ["--redirects=3"] if given.redirect_stdout_and_stderr else []
    words += [given.training_script, *given.training_script_args]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])


if __name__ == "__main__":
    main()
