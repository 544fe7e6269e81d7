"""Stands in for the launcher of OneFlow, and for nothing else: `python -m oneflow.distributed.launch`."""
