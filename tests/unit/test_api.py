"""What `import recmill` offers: every name is listed and typed, and none costs anything before it is used."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import recmill


def test_every_name_is_listed_declared_for_type_checkers_and_annotated() -> None:
    tree = ast.parse(Path(recmill.__file__).read_text())
    declared = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*recmill.__all__} == declared - {"TYPE_CHECKING", "Any"}
    assert {*recmill.__all__, "__version__"} == {*dir(recmill)}
    assert (Path(recmill.__file__).parent / "py.typed").is_file()
    for name in recmill.__all__:
        value = getattr(recmill, name)
        functions = (
            [value] if inspect.isfunction(value) else [f for _, f in inspect.getmembers(value, inspect.isfunction)]
        )
        for function in functions:
            signature = inspect.signature(function)
            assert function.__doc__ or function.__name__.startswith("__"), function
            assert signature.return_annotation is not inspect.Signature.empty, function
            parameters = [p for p in signature.parameters.values() if p.name != "self"]
            assert all(p.annotation is not inspect.Parameter.empty for p in parameters), function


def test_importing_and_listing_names_imports_nothing_else() -> None:
    code = "import sys, recmill; dir(recmill); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "polars", "numpy", "pydantic", "recmill.commands"} & {*done.stdout.split()}
