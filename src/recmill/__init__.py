"""Recmill trains recommenders with very large embedding tables, from a laptop to a cluster.

>>> from recmill import prepare, train, evaluate, recommend
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Run",
    "adopt",
    "audit",
    "compare",
    "download",
    "evaluate",
    "explain",
    "export_rows",
    "guess_schema",
    "history",
    "import_rows",
    "open_run",
    "plan",
    "plot",
    "predict",
    "prepare",
    "recommend",
    "recommend_all",
    "report",
    "results",
    "split",
    "train",
    "tune",
    "write_items",
]

if TYPE_CHECKING:
    from recmill.commands.adopt import adopt
    from recmill.commands.audit import audit
    from recmill.commands.checkpoint import export_rows
    from recmill.commands.compare import compare
    from recmill.commands.download import download
    from recmill.commands.evaluate import evaluate
    from recmill.commands.explain import explain
    from recmill.commands.history import history
    from recmill.commands.import_rows import import_rows
    from recmill.commands.items import write_items
    from recmill.commands.open_run import Run, open_run
    from recmill.commands.plan import plan
    from recmill.commands.plot import plot
    from recmill.commands.predict import predict
    from recmill.commands.prepare import prepare
    from recmill.commands.recommend import recommend, recommend_all
    from recmill.commands.report import report
    from recmill.commands.results import results
    from recmill.commands.schema import guess_schema
    from recmill.commands.split import split
    from recmill.commands.train import train
    from recmill.commands.tune import tune


else:  # a type checker reports an unknown name

    def __getattr__(name: str) -> Any:
        # Loaded on first use, so that `import recmill` is instant and needs no torch.
        if name in __all__:
            import importlib

            modules = {
                "Run": "open_run",
                "export_rows": "checkpoint",
                "guess_schema": "schema",
                "recommend_all": "recommend",
                "write_items": "items",
            }
            return getattr(importlib.import_module(f"recmill.commands.{modules.get(name, name)}"), name)
        raise AttributeError(f"module 'recmill' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
