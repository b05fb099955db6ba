"""Every command, settings file and code block of README.md and of docs/, in the order of each page.

Pages that go on from each other run in one folder (`JOURNEYS`). The commands are those of the page; what makes them
short comes from the environment (`SHORT`), the data that they need is laid out before (`workplace`). A command that
nothing here knows how to run fails the test. The tutorial runs as a notebook, in a kernel.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
import warm
from nbclient import NotebookClient
from openai_server import OpenAIServer
from pages import LANGUAGES, Block, blocks_of, pages, read_page
from places import DATA, ROOT
from rcr_trainer import cli
from tiny_bert import tiny_bert

from langchain_rcr import Item, SequentialCompositionalRetriever, TriEncoder

JOURNEYS = [
    ["README.md"],
    [
        *("docs/training.md", "docs/comparison.md", "docs/rewards.md", "docs/families.md"),
        *("docs/language-models.md", "docs/budgets.md", "docs/processes.md"),
    ],
    ["docs/text-to-sql.md"],
    ["docs/serving.md", "docs/learning.md", "docs/vector-stores.md", "docs/embeddings.md", "docs/languages.md"],
    ["docs/paper-tables.md"],
    ["docs/agents.md"],
]
NOTEBOOK = ("docs/tutorial.md", "examples/tutorial.ipynb")
"""A page that is followed as the notebook made of it."""
RECORDED = "docs/sql-tutorial.md"
"""A page that shows what a small model answered: `RECORD_FROM=http://127.0.0.1:8080/v1 pytest …` asks it again."""
ANSWERS = Path(__file__).with_name("sql_tutorial_answers.json")
"""What it answered, by the last message."""
RECORD = os.environ.get("RECORD_FROM", "")
CORPUS = DATA / "geoquery" / "corpus.xml"

SHORT = {
    "RCR_SFT__EPOCHS": "2",
    "RCR_DATA__TRAIN_SIZE": "30",
    "RCR_DATA__TEST_SIZE": "4",
    "RCR_DATA__DEV_SIZE": "5",
    "RCR_EVALUATION__SELECTORS": "random,bm25",
    "RCR_EVALUATION__ANSWER_QUERIES": "2",
    "RCR_GRPO__QUERIES": "5",
    "RCR_GRPO__GROUP_SIZE": "2",
    "RCR_GRPO__MAX_STEPS": "1",
    "RCR_GRPO__RACE": "16",
    "RCR_THREADS": "1",
}
WITHOUT_PRETRAINED_MODEL = {"RCR_MODEL__FAMILY": "lexical", "RCR_MODEL__BASE": "null", "RCR_MODEL__DIM": "32"}


class Session:
    """Runs the page's commands in `folder`, which looks like a clone with everything installed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, server: OpenAIServer | None = None) -> None:
        self.folder, self.monkeypatch, self.server = folder, monkeypatch, server

    def run(self, command: str) -> None:
        words = shlex.split(command, comments=True)
        assert not {"|", "&&", ";", ">", "<"} & set(words), f"one plain command a line, please: {command}"
        with self.monkeypatch.context() as patch:
            for name, value in SHORT.items():
                patch.setenv(name, value)
            while re.fullmatch(r"[A-Z_]+=.*", words[0]):
                patch.setenv(*words.pop(0).split("=", 1))
            known: dict[str, Callable[[list[str], pytest.MonkeyPatch], None]] = {
                "rcr-train": self.rcr_train,
                ".": self.activate,
                "python": self.python,
                "make": self.make,
                "torchrun": self.torchrun,
                "python3": self.make_environment,
                ".venv/bin/python": self.pip_install,
            }
            assert words[0] in known, f"teach {Path(__file__).name} to run: {command}"
            known[words[0]](words[1:], patch)

    def rcr_train(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        """As it stands, in this process: the script is `rcr_trainer.cli:main` (tested below)."""
        if any(word.endswith("paper_geoquery.yaml") for word in words):
            patch.setenv("RCR_MODEL__BASE", tiny_bert(self.folder / "tiny-bert", positions=256))
            patch.setenv("RCR_SFT__MAX_STEPS", "2")
        else:
            for name, value in WITHOUT_PRETRAINED_MODEL.items():
                patch.setenv(name, value)
        self.reach_the_server(words, patch)
        if self.server is not None:
            words = [word.replace("http://localhost:8000/v1", self.server.base_url) for word in words]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(words)
        assert code == 0, f"rcr-train {shlex.join(words)}: {err.getvalue()}"
        assert out.getvalue().strip(), f"rcr-train {shlex.join(words)} says nothing"

    def reach_the_server(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        """The one that the pages' settings name is here."""
        settings = self.folder / "my.yaml"
        if "my.yaml" in words and "kind: chat" in settings.read_text(encoding="utf-8") and self.server is not None:
            patch.setenv("RCR_LLM__BASE_URL", self.server.base_url)
            patch.setenv("OPENAI_API_KEY", "sk-test")

    def make(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        """As it stands; the stamps in .venv say that everything is installed. `make test` is what runs this."""
        if words == ["test"]:
            assert "\nmake test " in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
            return
        assert words == ["demo"], f"what does `make {shlex.join(words)}` do? Not run here yet"
        for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # of a `make test` around this
            patch.delenv(name, raising=False)
        warm.commands(self.folder / ".venv" / "bin")
        done = subprocess.run(["make", *words], cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "pip" not in done.stdout
        table, prompt = done.stdout.split("The prompt for one question")
        assert "rcr (ours)" in table
        assert prompt.count("\nTarget:") == 5

    def torchrun(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        """As it stands, by the module behind the script."""
        self.reach_the_server(words, patch)
        for name, value in WITHOUT_PRETRAINED_MODEL.items():
            patch.setenv(name, value)
        warm.commands(self.folder / ".venv" / "bin")
        patch.setenv("PYTHON_EXEC", str(self.folder / ".venv" / "bin" / "python"))
        done = warm.Program("-m", "torch.distributed.run", *words, cwd=self.folder).end(1000)
        assert done.returncode == 0, done.stderr
        run = json.loads((self.folder / "runs" / "parallel" / "run.json").read_text(encoding="utf-8"))
        assert run["stages"]["grpo"]["processes"] == 2

    def make_environment(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        """`python3 -m venv` elsewhere and without pip, which would take its time."""
        assert words == ["-m", "venv", ".venv"]
        target = str(self.folder / "fresh")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", target], check=True)

    def activate(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        """Not run: these tests' environment is active."""
        assert words == [".venv/bin/activate"]

    def python(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        """Installs as `pip_install` says; an example runs in this process."""
        if words[0] == "-m":
            self.pip_install(words, patch)
            return
        patch.setattr(sys, "argv", words)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(words[0], run_name="__main__")
        assert out.getvalue().strip()
        if "--train" in words and "--write" not in words:
            assert "Questions whose picks show every part of the right SQL:" in out.getvalue()
            assert re.search(r"^ +\d+\.\d% with ours$", out.getvalue(), re.MULTILINE)

    def pip_install(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        """Not run, as it is what made the environment of these tests; its files and extras are checked."""
        words = [word for word in words if word != "--quiet"]
        assert words[:5] == ["-m", "pip", "install", "-c", "constraints.txt"]
        assert words[5] == "-e"
        (extras,) = re.findall(r"^\.\[([\w,]+)\]$", words[6])
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a clone after `make test`, with the reader's files in it."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for entry in Path(sys.prefix).iterdir():
        if entry.name != "bin" and not entry.name.startswith(".installed"):
            (tmp_path / ".venv" / entry.name).symlink_to(entry)
    for name in ("use", "work"):
        (tmp_path / ".venv" / f".installed-for-{name}").touch()
    for name, numbers in (("train", range(60)), ("test", range(100, 108))):
        rows = [
            {"question": f"how many cities are in state {i}", "sql": f"SELECT a{i % 7} FROM city WHERE s = {i}"}
            for i in numbers
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sentence = {"text": "a ?", "variables": {}, "question-split": "train"}
    scholar = [{"query-split": part, "sql": ["SELECT a"], "sentences": [sentence]} for part in ("train", "test")]
    (tmp_path / "scholar.json").write_text(json.dumps(scholar), encoding="utf-8")
    if CORPUS.is_file():
        # So that nothing is downloaded.
        shutil.copytree(DATA / "geoquery", tmp_path / "data" / "geoquery")
        shutil.copy(DATA / "geoquery" / "splits_csl" / "template_1.json", tmp_path / "mine.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rcr_trainer.evaluation.harness.LATENCY_ROUNDS", 1)
    return tmp_path


@pytest.fixture
def demo(workplace: Path) -> None:
    """A small run in runs/demo, where `make demo` leaves its own."""
    examples = [
        {
            "source": f"what is the number of {color} {animal}",
            "target": f"count ( filter ( {color} , find ( {animal} ) ) )",
        }
        for color in ("black", "round", "gray")
        for animal in ("cat", "dog", "mouse")
    ]
    encoder = TriEncoder.build("structure", [Item(*each.values()) for each in examples], state="saturating")
    SequentialCompositionalRetriever.from_encoder(encoder, examples).save("runs/demo")


@pytest.mark.slow
@pytest.mark.parametrize("journey", JOURNEYS, ids=lambda journey: journey[0])
def test_everything_on_the_pages_works(
    journey: list[str], workplace: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if "docs/serving.md" in journey:
        request.getfixturevalue("demo")
        monkeypatch.setenv("DATABASE_URL", request.getfixturevalue("postgres_url"))
    with OpenAIServer(lambda prompt: "SELECT a0 FROM city") as server:
        if "docs/agents.md" in journey:
            monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
            monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        for page in journey:
            follow(page, Session(workplace, monkeypatch, server))
        assert server.paid or "docs/language-models.md" not in journey


def follow(page: str, session: Session) -> None:
    """All blocks of a page, from top to bottom; what needs the GeoQuery corpus is the next test's."""
    names: dict[str, object] = {}
    for block in blocks_of(read_page(page)):
        if block.title is not None:
            with (session.folder / block.title).open("a", encoding="utf-8") as file:
                file.write(block.text)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.text, page, "exec"), names)
            assert "print" not in block.text or out.getvalue().strip()
        elif block.language == "bash":
            for command in block.commands:
                if "geoquery" not in command:
                    session.run(command)
        elif block.language == "diff":
            swapped_in(block)


@pytest.mark.slow
def test_the_page_on_sql_shows_what_a_small_model_answered(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (workplace / name).unlink()
    answers = {} if RECORD else json.loads(ANSWERS.read_text(encoding="utf-8"))

    def answer(question: str) -> str:
        if RECORD and question not in answers:
            body = next(each.body for each in server.requests if each.prompt == question)
            url, headers = f"{RECORD}/chat/completions", {"Content-Type": "application/json"}
            asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
            answers[question] = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
        return str(answers[question])

    blocks = blocks_of(read_page(RECORDED))
    printed, shown = [], [block.text for block in blocks if block.language == "text"]
    with OpenAIServer(answer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        names: dict[str, object] = {}
        for block, below in pairwise([*blocks, blocks[-1]]):
            for command in block.commands if block.language == "bash" else ():
                Session(workplace, monkeypatch).run(command)
            if block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block.text, RECORDED, "exec"), names)
                printed += [out.getvalue()] if below.language == "text" else []
    if RECORD:
        ANSWERS.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
        print(*printed, sep="\n---\n")
    assert printed == shown


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel, with the commands in a shell; what installs is not in it, and followed on the page."""
    page, name = NOTEBOOK
    session = Session(workplace, monkeypatch)
    for command in (line for block in blocks_of(read_page(page)) for line in block.commands if "pip" in block.text):
        session.run(command)
    notebook = nbformat.reads(read_page(name), as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        if cell.source.rpartition("\n")[2].startswith("!"):
            cell.source += "\nassert _exit_code == 0"
    for variable, value in {**SHORT, **WITHOUT_PRETRAINED_MODEL}.items():
        monkeypatch.setenv(variable, value)
    for variable in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(workplace / "jupyter"))
    warm.commands(workplace / ".venv" / "bin")
    monkeypatch.setenv("PATH", f"{workplace / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    (workplace / "notebooks").mkdir()
    place = {"metadata": {"path": str(workplace / "notebooks")}}
    NotebookClient(notebook, timeout=200, resources=place).execute()
    assert all(cell.outputs for cell in cells)
    assert (workplace / "runs" / "bookshop-served" / "manifest.json").is_file()


def test_every_page_with_blocks_is_on_a_journey_and_says_what_they_are() -> None:
    assert sorted([*(page for journey in JOURNEYS for page in journey), NOTEBOOK[0], RECORDED]) == sorted(
        page for page in pages() if {block.language for block in blocks_of(read_page(page))} - {"text", "json"}
    )
    for page in pages():
        assert {block.language for block in blocks_of(read_page(page))} <= LANGUAGES


def swapped_in(block: Block) -> None:
    """The line that the page swaps in, on the run that the demo left."""
    (line,) = re.findall(r"^\+(.*)", block.text, re.MULTILINE)
    examples = [
        {"source": f"there is {n} cat", "target": f"exists ( find ( {n} ) )"} for n in ("a", "no", "one", "some")
    ]
    names = {"SequentialCompositionalRetriever": SequentialCompositionalRetriever, "examples": examples}
    exec(line, names)
    assert len(names["selector"].select_examples({"source": "there is some cat"})) == 4


@pytest.mark.slow
@pytest.mark.skipif(not CORPUS.is_file(), reason="the GeoQuery corpus is not there (RCR_DATA)")
def test_the_commands_on_geoquery_work(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(workplace, monkeypatch)
    blocks = [block for page in pages() for block in blocks_of(read_page(page)) if block.language == "bash"]
    for command in (line for block in blocks for line in block.commands if "geoquery" in line):
        session.run(command)
    assert (workplace / "runs" / "paper_geoquery" / "evaluation.json").is_file()


@pytest.mark.slow
def test_what_the_page_says_of_serving_your_own_files(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = read_page("docs/training.md")
    (settings,) = [block for block in blocks_of(page) if block.title == "my.yaml"]
    (workplace / "my.yaml").write_text(settings.text, encoding="utf-8")
    Session(workplace, monkeypatch).run("rcr-train run my.yaml")
    stored, own = re.findall(r"`(from_pretrained\(\"runs/my\".*?\))`", page)
    rows = [json.loads(line) for line in (workplace / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {"kind": SequentialCompositionalRetriever, "rows": rows}
    (first, *_) = eval(f"kind.{stored}", names).select_examples({"source": "how many cities"})
    assert {"source", "target"} <= first.keys()
    (first, *_) = eval(f"kind.{own}", names).select_examples({"question": "how many cities"})
    assert first in rows


@pytest.mark.parametrize(
    "command", ["rcr-trian run my.yaml", "make tset", "curl example.org", "rcr-train run my.yaml | tee log"]
)
def test_a_command_that_is_not_covered_is_found(workplace: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    with pytest.raises(AssertionError):
        Session(workplace, monkeypatch).run(command)


def test_the_console_script_is_the_function_that_is_called_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"rcr-train": "rcr_trainer.cli:main"}


@pytest.mark.parametrize(
    "page",
    [*(path.name for path in ROOT.glob("*.md")), *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))],
)
def test_local_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)#]+)", text) if "://" not in target]
    generated = {ROOT / "docs" / name for name in ("cli.md", "index.md", "settings.md")}
    places = [(ROOT / page).parent / target for target in targets]
    assert [place for place in places if not place.exists() and place not in generated] == []


def test_the_figures_of_the_readme_are_those_of_the_results() -> None:
    table = re.search(r"^## How much it helps\n.*?\n## ", read_page("README.md"), re.DOTALL | re.MULTILINE)
    assert table
    figures, results = re.findall(r"\d+\.\d", table[0].replace("0.5B", "")), read_page("docs/results.md")
    assert len(figures) >= 6
    assert [figure for figure in figures if figure not in results] == []


def test_the_notebook_is_the_tutorial() -> None:
    write = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["notebook_of"]
    assert (ROOT / "examples" / "tutorial.ipynb").read_text(encoding="utf-8") == write("tutorial.md")
