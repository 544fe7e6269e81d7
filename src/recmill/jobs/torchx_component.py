"""A torchx component: `torchx run -s SCHEDULER THIS_FILE:train --config FILE --run DIRECTORY -j NxP`.

Only torchx imports this file: Recmill does not depend on torchx.
"""

import shlex

import torchx.specs as specs
from torchx.components.dist import ddp


def train(
    config: str,
    run: str,
    j: str = "1x1",
    image: str = "",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 8000,
    mounts: str = "",
    args: str = "",
) -> specs.AppDef:
    """Trains the model of a run config with recmill train.

    Args:
        config: run config (.toml), as the machines see it
        run: run directory, as the machines see it
        j: {nodes}x{processes per node}
        image: container image that has Recmill; local_cwd and slurm need none
        cpu: cores per node
        gpu: GPUs per node
        memMB: memory per node
        mounts: volumes with data and runs, as type=volume,src=CLAIM,dst=/path[,type=...]
        args: further arguments of recmill train, quoted as for a shell
    """
    environment = {
        "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
        "GOMP_SPINCOUNT": "2000",
    }
    words = ["train", config, "--run-dir", run, *shlex.split(args)]
    return ddp(
        *(word.replace("$", "$$$$") for word in words),  # torchx replaces $NAME, and $$ by $; so does torchrun
        m="recmill",
        name="recmill",
        image=image,
        j=j,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        mounts=mounts.split(",") if mounts else None,
        env=environment,
    )
