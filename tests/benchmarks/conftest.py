"""What tests of benchmarks share."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
from places import ROOT


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """The script of benchmarks/ that the tests' module is named after."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module(request.module.__name__.removeprefix("test_benchmarks_"))
