"""Stands in for aws_component.py of facebookresearch/dlrm: `torchx run aws_component.py:run_dlrm_main -- ARGUMENTS`."""

import getpass
from pathlib import Path

import torchx.specs as specs
from torchx.components.dist import ddp

GPUS_PER_NODE = 8  # of an AWS p4d instance, with 96 cores


def run_dlrm_main(num_trainers: int = 8, *script_args: str) -> specs.AppDef:
    """Runs dlrm_main.py of the current directory.

    Args:
        num_trainers: processes, up to 8 or a multiple of 8
        script_args: arguments of dlrm_main.py
    """
    if num_trainers > GPUS_PER_NODE and num_trainers % GPUS_PER_NODE:
        raise ValueError(f"num_trainers = {num_trainers}: more than one node needs a multiple of {GPUS_PER_NODE}.")
    return ddp(
        *(word.replace("$", "$$$$") for word in script_args),  # torchx replaces $NAME, and $$ by $; so does torchrun
        name="train_dlrm",
        image=f"/data/home/{getpass.getuser()}",
        cpu=96,
        gpu=GPUS_PER_NODE,
        memMB=-1,
        script=str(Path.cwd() / "dlrm_main.py"),  # torchx sets no __file__ here
        j=f"{max(num_trainers // GPUS_PER_NODE, 1)}x{min(num_trainers, GPUS_PER_NODE)}",
    )
