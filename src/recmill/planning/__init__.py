"""Plan a run before it starts: explain the plan of TorchRec's planner (`tables/placement.py`), and forecast speed."""
