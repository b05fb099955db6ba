"""The report as one HTML file: what is in it, nothing planted gets out, and how a browser shows it."""

import json
import re
from html.parser import HTMLParser

import pytest
from chromium import BINARY, chromium
from rcr_trainer import cli
from rcr_trainer.baselines import names
from rcr_trainer.data import Example
from rcr_trainer.evaluation.page import write_page
from rcr_trainer.evaluation.report import AnswersAsked, Picked, Question, write_picks
from rcr_trainer.runs.folder import Run
from rcr_trainer.settings import Settings
from reports import report as report_on
from reports import scores

pytestmark = pytest.mark.slow
PLANTED = "</script><script>window.planted = 1</script><img src=x onerror='window.planted = 2'>"


NAMES = ["<root> -> f", "a", "f", "f -> a"]
# The first so many that a selector covers: f by its first pick, the others by its second.
COVERED = [[0, 0, 0, 0], [0, 0, 1, 0], [0, 2, 1, 0], [0, 2, 1, 2], [2, 2, 1, 2]]


def own(kind, covered, exact, text):
    picks = [Example(f"e{i}", f"shown {i} {text}", f"g{i} ( a ) {text}") for i in range(2)]
    return Picked(kind, picks, COVERED[covered], "f ( a )", exact, 0.5, None)


def evaluated(folder, *, text="", questions=3, **about):
    """A run folder as if it had been trained and evaluated."""
    run = Run.create(folder, Settings.model_validate({"name": folder.name, "tensorboard": False}))
    figures = {
        "rcr": scores(60.0, exact_match=50.0, by_step=[40.0, 60.0]),
        "bm25": scores(50.0, exact_match=40.0, by_step=[30.0, 50.0], intervals={"exact_match": (-0.02, 12.3)}),
        "oracle": scores(80.0, exact_match=90.0, by_step=[60.0, 80.0]),
    }
    report_on(figures, k=2, answers=AnswersAsked(f"m {text}", 3, 3), advice=f"Deploy it. {text}", **about).write(
        run.path
    )
    # Ours is exact once of three times; bm25 once where ours isn't; the last question nobody covers.
    ours, plain, oracle = [(3, True), (2, False), (1, False)], [(2, False), (2, True), (1, False)], [(4, True)] * 2
    picks = {"rcr": ours, "bm25": plain, "oracle": [*oracle, (3, False)]}
    kinds = {"rcr": "trained", "bm25": "plain", "oracle": "oracle"}
    write_picks(
        run.path,
        [
            Question(
                f"t{i}", f"question {i} {text}", f"f ( a ) {text}", "f ( a )", NAMES,
                {name: own(kinds[name], *figures[i % 3], text) for name, figures in picks.items()},
            )
            for i in range(questions)
        ],
    )  # fmt: skip
    return run


class Parsed(HTMLParser):
    """Tags with their attributes, and the texts of cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag in ("td", "th")
        if self.inside:
            self.cells.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.cells[-1] += data


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The page of two runs; texts of the first try to break out of it."""
    folder = tmp_path_factory.mktemp("page")
    planted = evaluated(folder / "one", text=PLANTED, split=PLANTED)
    return write_page([planted, evaluated(folder / "two", seed=1)], folder / "r.html")


@pytest.fixture(scope="module")
def text(file):
    return file.read_text(encoding="utf-8")


def test_the_page_has_tables_and_every_question(tmp_path):
    text = write_page([evaluated(tmp_path / "one")], tmp_path / "r.html").read_text(encoding="utf-8")
    page = Parsed(text)
    at = page.cells.index("rcr (ours)")
    assert page.cells[at : at + 3] == ["rcr (ours)", "50.0", "60.0"]
    at = page.cells.index("picks")
    assert page.cells[at : at + 6] == ["picks", "1", "2", "rcr (ours)", "40.0", "60.0"]
    at = page.cells.index("ours less")
    assert page.cells[at : at + 4] == ["ours less", "exact match", "bm25", "+10.0 (+0.0 to +12.3)"]
    (run,) = data_of(text)
    assert run["selectors"] == [["rcr", "trained", "rcr (ours)"], ["bm25", "plain", "bm25"],
                                ["oracle", "oracle", "oracle (of coverage)"]]  # fmt: skip
    assert run["examples"] == [["shown 0 ", "g0 ( a ) "], ["shown 1 ", "g1 ( a ) "]]
    first = run["questions"][0]
    assert first[:3] == ["t0", "question 0 ", "f ( a ) "]
    assert [run["structures"][i] for i in first[3]] == ["a", "f", "<root> -> f", "f -> a"]
    assert first[4][0] == [[0, 1], "2102", ["f ( a )", True, 0.5, None]]


def test_nothing_comes_from_elsewhere(text):
    for tag, attributes in Parsed(text).tags:
        assert tag not in ("link", "img", "iframe", "object", "base")
        for name in ("src", "href", "xlink:href", "action"):
            assert attributes.get(name, "#").startswith("#"), (tag, attributes)
    assert "default-src 'none'" in text
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", text)


def test_what_is_planted_in_the_data_stays_text(text):
    page = Parsed(text)
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [
        {"type": "application/json", "id": "data"}, {},
    ]  # fmt: skip
    assert not any(tag == "img" or name.startswith("on") for tag, attributes in page.tags for name in attributes)
    assert PLANTED in data_of(text)[0]["questions"][0][1]
    assert "<script>window.planted" not in text


def test_several_runs_share_a_page(text):
    cells = Parsed(text).cells
    at = cells.index("run")
    assert cells[at + 20 : at + 26] == ["two", "toy", "1", "2", "50.0", "40.0 (bm25)"]
    assert [data["name"] for data in data_of(text)] == ["one", "two"]


@pytest.mark.slow
def test_500_questions_stay_under_5_megabytes(tmp_path):
    """With names as long and as many as COVR's: 97 structures of 27 characters, every selector, four picks."""
    run = evaluated(tmp_path / "one")
    rows = []
    for i in range(500):
        needed = sorted(f"structure {(31 * i + 7 * j) % 9000:017d}" for j in range(97))
        own = {
            f"s{selector}": Picked(
                "plain",
                [Example(str(p), "q" * 70, f"{(i * 7 + p + selector) % 3000:0110d}") for p in range(4)],
                [2] * 60 + [0] * 37, "a" * 120, False, 0.5,
            )
            for selector in range(1 + len(names()))
        }  # fmt: skip
        rows.append(Question(str(i), "q" * 80, "p" * 120, "p" * 120, needed, own))
    write_picks(run.path, rows)
    assert write_page([run], tmp_path / "r.html").stat().st_size < 5e6


def test_the_command_writes_it_and_names_what_is_missing(here, capsys):
    run = evaluated(here / "one")
    assert cli.main(["report", "one"]) == 0
    assert re.fullmatch(r"written: one/report.html \(0\.\d MB\); open it in a browser\n", capsys.readouterr().out)
    evaluated(here / "two")
    assert cli.main(["report", "one", "two"]) == 0
    assert (here / "report.html").is_file()
    (run.path / "picks.jsonl").unlink()
    assert cli.main(["report", "one"]) == 2
    assert "one has no picks.jsonl: `rcr-train evaluate one` writes it" in capsys.readouterr().err
    (run.path / "evaluation.json").unlink()
    assert cli.main(["report", "one"]) == 2
    err = capsys.readouterr().err
    assert "one has no evaluation.json: `rcr-train run one/config.yaml --resume` does all that is missing" in err
    assert "`rcr-train evaluate one`" in err


# ---------------------------------------------------------------- in a browser

LIST = "document.getElementById('list')"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if BINARY is None:
        pytest.skip("no Chromium on the PATH")
    with chromium(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_without_a_complaint(page, file, width, dark):
    page.open(file, width=width, dark=dark)
    assert page.complaints == []
    assert page.requests == [file.as_uri()]
    assert page.run("typeof window.planted") == "undefined"
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth")
    light, *_ = re.findall(r"\d+", page.run("getComputedStyle(document.body).backgroundColor"))
    assert (int(light) < 128) == dark
    # Only what scrolls by itself may be wider than the window.
    assert (
        page.run("""[...document.querySelectorAll("body *")].filter((each) =>
        each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(".wide, .skip, svg, select")).length""")
        == 0
    )


def test_a_browser_filters_and_shows_questions(page, file):
    page.open(file)
    assert page.run(f"{LIST}.options.length") == 3
    shown = page.run("document.getElementById('question').textContent")
    assert PLANTED in shown
    assert "covers 3 of 4 structures" in shown
    assert "✓ exact" in shown
    assert "<root> -> f" in shown  # missing
    counts = {
        value: page.run(f"$('filter').value = '{value}'; showList(); {LIST}.options.length")
        for value in ("loses", "wins", "wrong", "uncovered", "missing", "all")
    }
    assert counts == {"loses": 1, "wins": 1, "wrong": 1, "uncovered": 1, "missing": 3, "all": 3}
    # Against the oracle, which is as good on the first question.
    rivals = page.run("[...$('rival').options].map((each) => each.text)")
    assert rivals == ["any plain selector", "bm25", "oracle"]
    assert page.run(f"$('filter').value = 'loses'; $('rival').value = 2; showList(); {LIST}.options.length") == 1
    assert page.run(f"$('filter').value = 'all'; $('words').value = 'T1 shown'; showList(); {LIST}.options.length") == 0
    assert page.run(f"$('words').value = 'T1 question'; showList(); {LIST}.options.length") == 1
    page.run("$('run').value = 1; showRun()")
    assert "planted" not in page.run("document.getElementById('question').textContent")
    assert page.complaints == []


def test_a_browser_goes_from_question_to_question_by_the_keyboard(page, file):
    page.open(file)
    page.run(f"{LIST}.focus()")
    page.press("ArrowDown", 40)
    assert page.run("document.querySelector('#question .note').textContent") == "question t1"
    page.run("document.getElementById('next').focus()")
    page.press("Enter", 13)
    page.run("new Promise(requestAnimationFrame)")
    assert page.run("document.activeElement.id") == "next"
