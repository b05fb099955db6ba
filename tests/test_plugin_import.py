"""`import langchain_rcr` is light, and every name it promises is there."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import langchain_rcr

ROOT = Path(__file__).parent.parent


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "faiss", "scipy", "langchain_core", "sentence_transformers"}
    assert not _modules_after("import langchain_rcr, langchain_rcr.errors; dir(langchain_rcr)") & heavy


def test_the_pool_and_the_errors_work_without_torch() -> None:
    loaded = _modules_after("from langchain_rcr import ExamplePool, Item, PoolError; ExamplePool()")
    assert not loaded & {"torch", "transformers", "faiss"}


def test_using_a_name_loads_what_it_needs() -> None:
    assert {"torch", "langchain_core"} <= _modules_after("from langchain_rcr import SequentialCompositionalRetriever")


def test_every_promised_name_exists_and_is_listed() -> None:
    for name in langchain_rcr.__all__:
        assert getattr(langchain_rcr, name).__name__ == name
    assert set(langchain_rcr.__all__) <= set(dir(langchain_rcr))


def test_the_version_is_that_of_the_distribution() -> None:
    assert langchain_rcr.__version__ == version("langchain-rcr")
    assert "torch" not in _modules_after("import langchain_rcr; langchain_rcr.__version__")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Retriever'"):
        langchain_rcr.Retriever  # noqa: B018
