"""Secrets in every place where a user can put one: no file, log, message or traceback of a run shows them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from openai_server import OpenAIServer
from rcr_trainer import cli
from rcr_trainer.evaluation import stage
from rcr_trainer.llm.redaction import HIDDEN, printable, redact, remember, remember_key, without_secrets
from rcr_trainer.runs.layers import differences, hidden, load_config, to_yaml
from rcr_trainer.settings import Settings

SECRETS = [
    *("hunter2-of-the-url", "key-in-the-query", "key-of-the-body", "bearer-of-the-header", "cookie-of-the-header"),
    *("hf_abcdefgh12345678", "password-in-a-list", "sk-of-the-environment", "hunter2-of-the-dsn", "dsn-parameter"),
    *("camel-token", "camel-key", "camel-secret", "camel-auth", "camel-password", "a-passphrase", "capital-key"),
]
NAMED = {
    **{"accessToken": "camel-token", "azureApiKey": "camel-key", "clientSecret": "camel-secret"},
    **{"authToken": "camel-auth", "proxyPassword": "camel-password", "passphrase": "a-passphrase"},
    **{"Ocp-Apim-Subscription-Key": "capital-key", "sharedKeys": ["camel-key"]},
}
HARMLESS = {
    **{
        "limits": {"max_tokens": "256"},
        "maxOutputTokens": "256",
        "tokenizer": "bert",
        "keys": "all",
        "monkey": "rhesus",
    },
    **{"source_key": "question", "target_key": "program", "author": "me", "design": "plain"},
}
EXTRA = {
    "api_key": "key-of-the-body",
    "top_k": 20,
    "nested": [{"password": "password-in-a-list", "default_headers": {"X-Any": "cookie-of-the-header"}}],
    "headers": {"Authorization": "Bearer bearer-of-the-header"},
    "note": "with hf_abcdefgh12345678",
    "named": NAMED,
    **HARMLESS,
}
DSN = "postgresql://me:hunter2-of-the-dsn@127.0.0.1:9/db?connect_timeout=1&sslpassword=dsn-parameter"


def settings(server: OpenAIServer, **more: Any) -> dict[str, Any]:
    address = server.base_url.replace("//", "//me:hunter2-of-the-url@")
    return {
        "threads": 1,
        "data": {"train_size": 40, "test_size": 4, "dev_size": 4},
        "model": {"family": "lexical", "dim": 8},
        "sft": {"epochs": 1},
        "llm": {"kind": "chat", "model": "m", "base_url": address, "extra_body": EXTRA, "attempts": 1, "backoff": 0},
        "evaluation": {"answers": True, "selectors": ["random"]},
        **more,
    }


def leaks(folder: Path, *texts: str) -> list[str]:
    """Where a secret stands in clear text: in the files below the folder, or in these texts."""
    found = [f"{n}: {secret}" for n, text in enumerate(texts) for secret in SECRETS if secret in text]
    for file in folder.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        found += [f"{file}: {secret}" for secret in SECRETS if secret.encode() in content]
    return found


@pytest.mark.slow
def test_no_file_log_or_traceback_of_a_run_shows_a_secret(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
    with OpenAIServer() as server:
        config = here / "mine.yaml"
        config.write_text(yaml.safe_dump(settings(server)))
        flags = [f"--llm.base_url={settings(server)['llm']['base_url']}", "--name=first"]
        monkeypatch.setattr("sys.argv", ["rcr-train", "run", str(config), *flags])
        assert cli.main(["run", str(config), *flags]) == 0
        sent = server.requests[0]
        assert (sent.body["api_key"], sent.body["nested"]) == (EXTRA["api_key"], EXTRA["nested"])
        config.rename(here.parent / "mine.yaml")  # the user's own file, with the user's own rights
        assert leaks(here, *capsys.readouterr()) == []

        # It goes on, and is compared again, with the secrets given again, not without.
        again = ["run", str(here.parent / "mine.yaml"), "--name=first"]
        assert cli.main(again) == 0
        evaluated = ["evaluate", "runs/first", "--trust", "--evaluation.selectors=bm25"]
        assert cli.main(evaluated) == 2
        said = capsys.readouterr().err
        assert (
            "llm.base_url had a secret, which run folders don't keep: give it again, as RCR_LLM__BASE_URL or --" in said
        )
        monkeypatch.setenv("RCR_LLM__BASE_URL", settings(server)["llm"]["base_url"])
        monkeypatch.setenv("RCR_LLM__EXTRA_BODY", yaml.safe_dump(EXTRA))
        monkeypatch.setenv("RCR_LLM__MODEL", "of the next training")
        assert cli.main(evaluated) == 0
        assert server.requests[-1].body["model"] == "m"
        monkeypatch.undo()
        monkeypatch.chdir(here)

        # What fails says why without them: the server, the database, the settings, a bug.
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-environment")
        server.fault_of = lambda request: "echo_key"
        failing = here.parent / "mine.yaml"
        assert cli.main(["run", str(failing), "--name=second", "--llm.max_tokens=99"]) == 2
        reward = {"names": ["execution"], "database": DSN}
        failing.write_text(yaml.safe_dump(settings(server, reward=reward, grpo={"enabled": True})))
        assert cli.main(["run", str(failing), "--name=third"]) == 2
        assert "no connection" in capsys.readouterr().err
        assert cli.main(["run", str(failing), "--llm.kind=local"]) == 2
        assert cli.main(["run", str(failing), f"--threads={DSN}"]) == 2

        def bug(path: Path) -> None:
            raise RuntimeError(f"{EXTRA} {DSN} {settings(server)['llm']['base_url']} sk-of-the-environment")

        monkeypatch.setattr(stage, "read_split", bug)
        assert cli.main(["evaluate", "runs/first", "--trust"]) == 1
        out, err = capsys.readouterr()
        assert "Traceback" in err
        assert "RuntimeError" in err
        assert leaks(here, out, err) == []


def test_run_folders_hold_what_is_no_secret_and_compare_without() -> None:
    one = Settings.model_validate(
        {
            "llm": {"base_url": "https://me:pw12@host:8000/v1?api_key=abcd&v=1", "extra_body": EXTRA},
            "reward": {"database": DSN},
        }
    )
    text = to_yaml(one)
    values = yaml.safe_load(text)
    assert values["llm"]["base_url"] == f"https://{HIDDEN}@host:8000/v1?api_key={HIDDEN}&v=1"
    assert (
        values["reward"]["database"] == f"postgresql://{HIDDEN}@127.0.0.1:9/db?connect_timeout=1&sslpassword={HIDDEN}"
    )
    assert values["llm"]["extra_body"] == {
        "api_key": HIDDEN,
        "top_k": 20,
        "nested": [{"password": HIDDEN, "default_headers": {"X-Any": HIDDEN}}],
        "headers": {"Authorization": HIDDEN},
        "note": f"with {HIDDEN}",
        "named": {**dict.fromkeys(NAMED, HIDDEN), "sharedKeys": [HIDDEN]},
        **HARMLESS,
    }
    assert values["llm"]["max_tokens"] == one.llm.max_tokens
    again = Settings.model_validate(values)
    assert hidden(again) == ["llm.base_url", "llm.extra_body", "reward.database"]
    assert hidden(one) == []
    assert differences(one, again) == []
    other = one.model_copy(update={"llm": one.llm.model_copy(update={"base_url": "https://me:pw12@other:8000/v1"})})
    (difference,) = differences(one, other)
    assert "pw12" not in difference


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://host/v1", "http://host/v1"),
        ("http://u:p@ss:w/ord@host/v1", f"http://{HIDDEN}@host/v1"),
        ("http://token@host", f"http://{HIDDEN}@host"),
        ("https://h/v1?key=AIsecret", f"https://h/v1?key={HIDDEN}"),
        ("https://h/v1?v=1&KEY=AIsecret&w=2", f"https://h/v1?v=1&KEY={HIDDEN}&w=2"),
        ("https://h/v1?accessToken=abc&passphrase=d", f"https://h/v1?accessToken={HIDDEN}&passphrase={HIDDEN}"),
        ("https://h/v1?monkey=rhesus&source_key=question&keys=all", None),
        ("host=h password=pw dbname=d", f"host=h password={HIDDEN} dbname=d"),
        (r"host=h password = 'p w\'x' dbname=d", f"host=h password = '{HIDDEN}' dbname=d"),
        ("host=h password = pw dbname=d", f"host=h password = {HIDDEN} dbname=d"),
        ('{"api_key": "abc", "x": 1}', f'{{"api_key": "{HIDDEN}", "x": 1}}'),
        ("Authorization: Bearer abcdef123", f"Authorization: Bearer {HIDDEN}"),
        ("Incorrect API key provided: sk-abcdefghij1234", f"Incorrect API key provided: {HIDDEN}"),
        ("no API key: set the environment variable OPENAI_API_KEY", None),
        ("--data.source_key=question --llm.api_key_env=MY_KEY --llm.max_tokens=256", None),
        ("hub:org/name@main package:x.y langchain:a:b me@example.org", None),
    ],
)
def test_what_looks_like_a_secret(text: str, shown: str | None) -> None:
    assert redact(text) == (text if shown is None else shown)


def test_addresses_without_end_take_no_quadratic_time() -> None:
    assert redact("://a:" * 50_000) == "://a:" * 50_000  # this would take minutes


def test_the_password_of_a_database_is_in_no_representation() -> None:
    pgvector = pytest.importorskip("langchain_rcr.index.pgvector")
    index = pgvector.PgVectorIndex("postgresql://me:hunter2-of-the-dsn@host/shop")
    assert "hunter2-of-the-dsn" not in f"{index!r} {index}"


def test_an_api_key_in_place_of_its_variable_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("llm: {api_key_env: sk-abcdefgh12345678}")
    with pytest.raises(ValueError, match=r"llm\.api_key_env must be the name of an environment variable") as error:
        load_config(tmp_path / "x.yaml", environ={})
    assert "sk-abc" not in str(error.value)


def test_control_characters_are_visible() -> None:
    assert printable("a\x1b[31mb\u202ec\ud800\r\x9b\td\n") == "a\ufffd[31mb\ufffdc\ufffd\ufffd\ufffd\td\n"
    assert printable("Größe 人口 👩‍👩‍👧 e\u0301 \u00a0") == "Größe 人口 👩‍👩‍👧 e\u0301 \u00a0"
    remember({"key": "abc"})
    assert redact("abc") == "abc"  # would be found in any text
    assert without_secrets({"keys": 3, "token": None, "secret": ""}) == {"keys": 3, "token": None, "secret": ""}


@pytest.mark.parametrize("placeholder", ["none", "EMPTY", "no-key"])
def test_what_stands_for_no_key_is_no_secret(placeholder):
    remember_key(placeholder)
    assert redact(f"{placeholder} of the 40 programs parses") == f"{placeholder} of the 40 programs parses"
