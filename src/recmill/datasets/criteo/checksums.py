"""Published MD5s of Criteo's 1TB logs and of what MLPerf makes of them."""

from importlib import resources


def published_md5s(name: str) -> dict[str, str]:
    """Return file -> MD5.

    `logs` are the raw .gz files, from the README of MLPerf Inference's DLRM. `mlperf_v2` are the preprocessed npy
    files of DLRMv2 and their multi-hot ids, from facebookresearch/dlrm.
    """
    lines = (resources.files(__package__) / f"{name}.md5").read_text().splitlines()
    return {file: md5 for md5, file in (line.split() for line in lines)}
