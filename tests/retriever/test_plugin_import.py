"""`import langchain_rcr` is light, and every name it promises is there, whichever extras are installed."""

import json
import pickle
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from places import ROOT

import langchain_rcr

EXTRAS = {
    "FaissIndex": "faiss",
    "PgVectorIndex": "pgvector",
    "FewShotMiddleware": "agents",
    "ComposedToolSelector": "agents",
}
"""Those that need an extra → the extra."""

WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(("faiss", "psycopg", "sqlglot", "matplotlib", "langchain")))
"""


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _modules_after(statement: str) -> set[str]:
    return set(_python(f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})").split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "faiss", "scipy", "langchain_core", "sentence_transformers"}
    assert not _modules_after("import langchain_rcr, langchain_rcr.errors; dir(langchain_rcr)") & heavy


@pytest.mark.slow
def test_the_pool_and_the_errors_work_without_torch() -> None:
    loaded = _modules_after("from langchain_rcr import ExamplePool, Item, PoolError; ExamplePool()")
    assert not loaded & {"torch", "transformers", "faiss"}


@pytest.mark.slow
def test_every_promised_name_exists_and_is_listed() -> None:
    for name in langchain_rcr.__all__:
        assert getattr(langchain_rcr, name).__name__ == name
    assert set(langchain_rcr.__all__) <= set(dir(langchain_rcr))


def test_the_version_is_that_of_the_distribution() -> None:
    assert langchain_rcr.__version__ == version("langchain-rcr")
    assert "torch" not in _modules_after("import langchain_rcr; langchain_rcr.__version__")


@pytest.fixture(scope="module")
def without_extras() -> dict[str, Any]:
    """What a process without any extra prints: its modules, the page of `pydoc`, and what creating each class says."""
    kinds = ", ".join(EXTRAS)
    return json.loads(
        _python(
            f"""{WITHOUT_EXTRAS}
import json, pydoc
from langchain_rcr import *
said = {{"modules": [*sys.modules]}}
assert set(__import__("langchain_rcr").__all__) <= set(globals())
said["help"] = pydoc.plain(pydoc.render_doc("langchain_rcr"))
for kind in ({kinds}):
    try:
        kind("postgresql://localhost/none")
    except MissingExtraError as error:
        said[kind.__name__] = str(error)
print(json.dumps(said))
"""
        )
    )


@pytest.mark.slow
def test_using_a_name_loads_what_it_needs(without_extras: dict[str, Any]) -> None:
    assert "langchain_core" in without_extras["modules"]
    assert not {"torch", "transformers"} & {*without_extras["modules"]}


@pytest.mark.slow
def test_the_help_works_without_any_extra(without_extras: dict[str, Any]) -> None:
    assert [name for name in langchain_rcr.__all__ if name not in without_extras["help"]] == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "extra"), EXTRAS.items())
def test_a_class_without_its_extra_names_the_pip_command(without_extras: dict[str, Any], name: str, extra: str) -> None:
    assert without_extras[name].endswith(f"is not installed: pip install 'langchain-rcr[{extra}]'")


def test_a_language_without_its_extra_names_the_pip_command() -> None:
    code = f"""{WITHOUT_EXTRAS}
from langchain_rcr import MissingExtraError
from langchain_rcr.programs import ProgramSpec
assert ProgramSpec("functional").structures("f(a)")
try:
    ProgramSpec("sql")
except MissingExtraError as error:
    print(error)
"""
    assert _python(code).strip() == "sqlglot is not installed: pip install 'langchain-rcr[sql]'"


def test_a_missing_extra_comes_back_from_another_process() -> None:
    """`multiprocessing.Pool` waits for ever for an error that it can't unpickle."""
    told = langchain_rcr.MissingExtraError("sqlglot", "sql")
    back = pickle.loads(pickle.dumps(told))
    assert (str(back), back.extra) == (str(told), "sql")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Retriever'"):
        langchain_rcr.Retriever  # noqa: B018
