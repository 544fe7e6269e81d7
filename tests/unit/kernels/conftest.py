from collections.abc import Iterator

import pytest

from recmill.kernels import library as module
from recmill.kernels.library import KernelLibrary, load_library


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    """A test may load the library under other conditions."""
    yield
    module._load_or_warn.cache_clear()
    module._load_parser_or_warn.cache_clear()


@pytest.fixture
def library() -> KernelLibrary:
    loaded = load_library()
    assert loaded is not None, "the tests need a C++ compiler"
    return loaded
