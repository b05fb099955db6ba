"""A checkpoint and a run folder of a stranger, read by a child process under an audit hook and a limit on memory.

Nothing of it is imported, nothing is connected to, no token and no file outside is opened; what is larger than it may
be is refused in one line.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import warm
from hostile import CONFIG, EXAMPLES, HOSTILE, Change, changed, checkpoint, inner, named
from rcr_trainer.data.examples import Split, write_split
from rcr_trainer.runs.folder import Run
from rcr_trainer.runs.layers import to_yaml
from rcr_trainer.settings import Settings
from toys import installed, reseal

from langchain_rcr import CheckpointError, SequentialCompositionalRetriever, TriEncoder

WATCHED = """
import json, resource, sys, time
from pathlib import Path

root = Path(sys.argv[1])
NETWORK = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostby", "socket.sendto", "urllib.")
PROCESSES = ("subprocess.Popen", "os.exec", "os.fork", "os.posix_spawn", "os.system")
seen = None

def hook(event, arguments):
    if seen is None:
        return
    if event.startswith(NETWORK + PROCESSES):
        seen.append(f"{event} {arguments!r}"[:200])
    if event == "import" and "evil" in arguments[0]:
        seen.append(f"import {arguments[0]}")
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = str(Path(arguments[0] if isinstance(arguments[0], str) else arguments[0].decode()).resolve())
        allowed = [str(root / inside), *(str(root / "package" / name) for name in ("evil/m", "evil-1.0.dist-info"))]
        if path.startswith(str(root)) and not path.startswith(tuple(allowed)):
            seen.append(f"open {path}")

sys.addaudithook(hook)
import rcr_trainer.cli, rcr_trainer.evaluation.stage, transformers  # what they read themselves is no matter
from langchain_rcr import RCRError, SequentialCompositionalRetriever

# What would exhaust the machine fails here.
most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (most, most))

def checkpoint(folder):
    retriever = SequentialCompositionalRetriever.from_pretrained(folder, k=2)
    retriever.select_examples({"source": "how many a are there"})

def run(folder):
    run_of = rcr_trainer.runs.folder.Run.open(folder)
    rcr_trainer.evaluation.stage.evaluation_stage(run_of)

for inside in sorted(path.name for path in root.iterdir() if path.name.startswith(("checkpoint", "run"))):
    seen, said, began = [], "fine", time.process_time()
    try:
        (checkpoint if inside.startswith("checkpoint") else run)(root / inside)
    except RCRError as error:
        said = str(error)
    found, seen = seen, None
    if time.process_time() - began > 10:
        said += " (after 10 s)"
    print(json.dumps([inside, said, found]))
"""


def over(base: str) -> Change:
    return lambda folder: changed(folder / "backbone.json", base=base)


def linked(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder.parent / "outside" / "secret.json")

    return change


def circular(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(name)

    return change


def piped(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


CHECKPOINTS: dict[str, tuple[Change, str]] = {
    "package": (over("package:evil"), "fine"),
    "package-folder": (over("package:private"), "Python package 'private' is not installed"),
    "package-dotted": (over("package:evil.x"), "Python package 'evil.x' is not installed"),
    "hub": (over("somebody/model"), "which it names but doesn't contain: trust=True"),
    "folder": (over("../outside"), "which it names but doesn't contain: trust=True"),
    "inside": (over("checkpoint:../outside"), "which it names but doesn't contain: trust=True"),
    "pooling": (lambda folder: changed(folder / "backbone.json", pooling="evil"), "pooling must be one of mean, cls"),
    "family": (lambda folder: changed(folder / "tri_encoder.json", family="evil:run"), "unknown encoder family"),
    "absolute": (named("/etc/passwd.json"), "names '/etc/passwd.json', which is not a file of a checkpoint"),
    "parent": (named("../outside/secret.json"), "names '../outside/secret.json'"),
    "code": (named("modeling.py"), "names 'modeling.py'"),
    "link": (linked("backbone.json"), "names 'backbone.json'"),
    "link-meta": (linked("tri_encoder.json"), "names 'tri_encoder.json'"),
    "link-manifest": (linked("manifest.json"), "names 'manifest.json'"),
    "link-card": (linked("README.md"), "names 'README.md'"),
    "link-pool": (linked("pool.jsonl"), "names 'pool.jsonl'"),
    "circle": (circular("backbone.json"), "is not a complete checkpoint: backbone.json is missing"),
    "circle-meta": (circular("tri_encoder.json"), "is not a complete checkpoint: tri_encoder.json is missing"),
    "pipe-meta": (piped("tri_encoder.json"), "is not a complete checkpoint: tri_encoder.json is missing"),
    "pipe-manifest": (piped("manifest.json"), "is not a complete checkpoint: manifest.json is missing"),
    "remote-code": (inner(CONFIG, auto_map={"AutoModel": "evil.Model"}), "'auto_map'"),
    "kernel": (inner(CONFIG, attn_implementation="evil/kernel"), "'attn_implementation'"),
    "vocabulary": (inner("backbone/tokenizer_config.json", vocab_file="/etc/passwd"), "'vocab_file'"),
    "adapter": (
        lambda folder: ((folder / "backbone" / "adapter_config.json").write_text("{}"), reseal(folder))[-1],
        "adapter_config.json names other models",
    ),
}

SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "base": ({"model": {"family": "embeddings", "base": "langchain:evil:make"}}, "import evil:make (model.base)"),
    "embeddings": ({"evaluation": {"embeddings": "somebody/model"}}, "open the model somebody/model (evaluation.emb"),
    "contriever": ({"evaluation": {"selectors": ["contriever"]}}, "facebook/contriever (evaluation.contriever)"),
    "server": (
        {"llm": {"kind": "chat", "model": "m", "base_url": "http://localhost:9", "api_key_env": "HOME", "cache": "x"}},
        "ask http://localhost:9 (llm.base_url), send it $HOME (llm.api_key_env), write x (llm.cache)",
    ),
    "local": ({"llm": {"kind": "local", "model": "/outside"}}, "open the model /outside (llm.model)"),
    "executor": ({"llm": {"model": "m"}, "reward": {"executor": "evil:run"}}, "import evil:run (reward.exec"),
    "database": ({"llm": {"model": "m"}, "reward": {"database": "x.db"}}, "open x.db (reward.database)"),
    "reward": ({"grpo": {"enabled": True}, "reward": {"names": ["evil:score"]}}, "fine"),
}


def run_folder(folder: Path, settings: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "model": {"family": "lexical", "dim": 4},
        "evaluation": {"k": 2, **settings.pop("evaluation", {"selectors": ["random"]})},
    }
    config = Settings.model_validate(values | settings)
    if config.llm.kind in ("chat", "completion") and config.llm.given:
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"answers": True})})
    run = Run.create(folder, config)
    write_split(folder / "data", Split("s", EXAMPLES[:4], EXAMPLES[4:6], EXAMPLES[6:], {"task": "files"}))
    checkpoint(folder / "checkpoint", dim=4)
    checkpoint(folder / "checkpoint-sft", dim=4)
    for stage in ("data", "sft", "grpo"):
        with run.stage(stage):
            pass
    (folder / "config.yaml").write_text(to_yaml(config))


@pytest.mark.slow
def test_a_strangers_checkpoint_and_run_are_data(tmp_path: Path, bert: str) -> None:
    evil = tmp_path / "package" / "evil"
    shutil.copytree(bert, evil / "m")
    for name in ("__init__.py", "x.py"):
        (evil / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.json").write_text('{"secret": 1}')
    home = tmp_path / "home"
    for token in (home / ".cache" / "huggingface" / "token", home / ".huggingface" / "token"):
        token.parent.mkdir(parents=True)
        token.write_text("hf_a_token_of_the_user")
    installed(tmp_path / "package", "evil")
    shutil.copytree(evil, tmp_path / "package" / "private")
    expected = {}
    for family, changes in (HOSTILE | {"embeddings": CHECKPOINTS}).items():
        model = checkpoint(tmp_path / family, family, **({"dim": 4} if family == "lexical" else {"base": bert}))
        for name, (change, words) in changes.items():
            change(Path(shutil.copytree(model, tmp_path / f"checkpoint-{name}", symlinks=True)))
            expected[f"checkpoint-{name}"] = words
        shutil.move(model, tmp_path / f"checkpoint-sound-{family}")
        expected[f"checkpoint-sound-{family}"] = "fine"
    for name, (settings, _) in SETTINGS.items():
        run_folder(tmp_path / f"run-{name}", dict(settings))
    for name in ("evaluation.json", "run.lock", "config.yaml"):
        run_folder(tmp_path / f"run-link-{name}", {})
        linked(name)(tmp_path / f"run-link-{name}")

    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    path = [str(tmp_path / "package"), *(entry for entry in sys.path if entry)]
    environ: dict[str, str | None] = {name: None for name in os.environ if name.startswith(("HF_", "OPENAI_"))}
    environ |= {
        "PYTHONPATH": os.pathsep.join(path),
        "HOME": str(home),
        "OPENAI_API_KEY": "sk-of-the-user",
        "HF_TOKEN": "hf_of_the_user",
    }
    done = warm.run(script, tmp_path, environ=environ, fresh=True)
    assert done.returncode == 0, done.stderr
    said = {name: (message, seen) for name, message, seen in map(json.loads, done.stdout.splitlines())}
    expected |= {f"run-{name}": words for name, (_, words) in SETTINGS.items()}
    expected |= {f"run-link-{name}": f"{name} is a link" for name in ("evaluation.json", "run.lock", "config.yaml")}
    assert said.keys() == expected.keys()
    assert {name: seen for name, (_, seen) in said.items() if seen} == {}
    assert {name: message for name, (message, _) in said.items() if "\n" in message} == {}
    assert {name: message for name, (message, _) in said.items() if expected[name] not in message} == {}
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "outside" / "secret.json").read_text() == '{"secret": 1}'


def test_a_circle_of_links_is_no_bug(tmp_path: Path) -> None:
    run_folder(tmp_path / "run", {})
    (tmp_path / "run" / "report.md").symlink_to("report.md")
    assert Run.open(tmp_path / "run").done("sft")


def test_trust_names_the_models_that_may_be_loaded(tmp_path: Path, bert: str) -> None:
    folder = checkpoint(tmp_path / "c", family="embeddings", base=bert)
    over(bert)(folder)
    shutil.rmtree(folder / "backbone")
    reseal(folder)
    for trust in (False, [], ["another"], "x"):
        with pytest.raises(CheckpointError, match="which it names but doesn't contain: trust=True"):
            TriEncoder.from_pretrained(folder, trust=trust)
    for trust in (True, [bert]):
        assert TriEncoder.from_pretrained(folder, trust=trust).dim == 16
    assert SequentialCompositionalRetriever.from_pretrained(folder, trust=True, k=2).invoke("how many")
