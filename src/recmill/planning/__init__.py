"""Plan a run before it starts: what each rank holds, how long a step takes, and what limits it.

Entry points: `memory.explain`, `forecast.forecast`, `changes.find_changes`, `calibrate.calibrate`. TorchRec's planner
decides where tables go (`tables/placement.py`); this package explains its plan.
"""
