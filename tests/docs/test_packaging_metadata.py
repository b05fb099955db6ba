"""pyproject.toml, constraints.txt, Makefile and .ci/run agree with the code and with each other."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from places import ROOT

import langchain_rcr

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
PINS = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)
SERVING = ("agents", "faiss", "onnx", "pgvector", "qdrant", "sql")
"""Extras that `langchain_rcr` itself has a use for."""
PACKAGES = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
STDLIB_AND_OURS = {*sys.stdlib_module_names, "_typeshed", "langchain_rcr", "rcr_trainer"}


def declared(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def imported(folder: Path) -> set[str]:
    """The distributions that the modules of a package import."""
    modules = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add((node.module or "").split(".")[0])
    owners = packages_distributions()
    return {canonicalize_name(owners[module][0]) for module in modules - STDLIB_AND_OURS}


def test_git_ignores_nothing_of_the_packages() -> None:
    """The wheel is built without what git ignores, tracked or not: a pattern once took a whole room."""
    patterns = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if not line.startswith("/")]
    files = [path.relative_to(ROOT) for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [path for path in files for part in path.parts for each in patterns if fnmatch(part, each)] == []


@pytest.mark.slow
def test_serving_declares_what_it_imports_and_no_more() -> None:
    extras = [text for name in SERVING for text in EXTRAS[name]]
    # pydantic-core is a part of pydantic; the others are for training, and serve where they are there.
    beyond = {"pydantic-core", "scipy", "torch", "transformers"}
    assert imported(ROOT / "langchain_rcr") - beyond == declared([*PROJECT["dependencies"], *extras])
    assert {"scipy", "torch", "transformers"} <= declared(EXTRAS["train"])


@pytest.mark.slow
def test_training_declares_what_it_imports_beyond_that_and_no_more() -> None:
    beyond = imported(ROOT / "trainer" / "rcr_trainer") - declared(PROJECT["dependencies"])
    serving = declared([text for name in SERVING for text in EXTRAS[name]])
    # pydantic-core is a part of pydantic.
    training = declared([*EXTRAS["train"], *EXTRAS["parquet"]])
    assert beyond - {"pydantic-core"} - serving == training - {"langchain-rcr"}


@pytest.mark.parametrize(
    "text", sorted({text for texts in (PROJECT["dependencies"], *EXTRAS.values()) for text in texts})
)
def test_a_pin_lies_in_the_range_of_its_requirement(text: str) -> None:
    requirement = Requirement(text)
    if requirement.name == PROJECT["name"]:
        assert requirement.extras <= EXTRAS.keys()
    else:
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_pins_are_plain_versions_in_order() -> None:
    assert list(PINS) == sorted(PINS)
    assert [version for version in PINS.values() if not re.fullmatch(r"[\d.]+(b\d+)?", version)] == []


def test_the_changelog_begins_with_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = [name for name in re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE) if name != "Unreleased"]
    assert versions[0] == langchain_rcr.__version__


def test_both_packages_say_that_they_are_typed() -> None:
    assert (ROOT / "langchain_rcr" / "py.typed").is_file()
    assert (ROOT / "trainer" / "rcr_trainer" / "py.typed").is_file()


def test_the_source_distribution_includes_only_what_exists() -> None:
    included = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [name for name in included if not (ROOT / name).exists()] == []
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "langchain_rcr/__init__.py"


# ---------------------------------------------------------------- what GitHub shows


def test_the_citation_names_this_version_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["title"], citation["version"]) == (PROJECT["name"], langchain_rcr.__version__)
    assert citation["repository-code"] == PROJECT["urls"]["Source"]
    paper = citation["preferred-citation"]
    assert paper["title"].startswith("Reinforcing Compositional Retrieval")
    assert [author["family-names"] for author in paper["authors"]] == ["Long", "Chen", "Liu", "Chen", "Wang", "Pan"]


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_an_issue_form_is_one_that_github_accepts(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    for field in form["body"]:
        assert field["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"]["label"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))


def test_all_links_to_the_project_lead_to_its_one_address() -> None:
    files = [ROOT / name for name in ("pyproject.toml", "CITATION.cff", "SECURITY.md")]
    for path in [*files, *(ROOT / ".github").rglob("*.yml")]:
        for address in re.findall(r"https://github\.com/[\w-]+/[\w-]+", path.read_text(encoding="utf-8")):
            assert address == PROJECT["urls"]["Source"], path


# ---------------------------------------------------------------- Makefile


def make(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def plan(clone: Path, target: str) -> str:
    """What `make` would do; recursive calls with a dry run of their own."""
    done = make("-n", target, folder=clone)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_fresh_clone_installs_with_the_constraints(clone: Path) -> None:
    for target, extras in (("demo", "[train,offline]"), ("test", "[dev]")):
        steps = plan(clone, target)
        assert "-m venv .venv" in steps
        for installer in ("uv pip install", "-m pip install"):
            assert re.search(rf"{installer} .*-c constraints\.txt -e '\.{re.escape(extras)}'", steps)


def test_the_second_call_installs_nothing_until_the_versions_change(clone: Path) -> None:
    (clone / ".venv").mkdir()
    stamp = clone / ".venv" / ".installed-for-work"
    for path in (stamp, stamp.with_name(".installed-for-use")):
        path.touch()
    for target in ("demo", "test"):
        assert "pip" not in plan(clone, target)
    later = stamp.stat().st_mtime + 10
    os.utime(clone / "constraints.txt", (later, later))
    for target in ("demo", "test"):
        assert "pip install" in plan(clone, target)


@pytest.mark.parametrize("target", ["check", "test"])
def test_the_tests_are_preceded_by_lint(clone: Path, target: str) -> None:
    steps = plan(clone, target)
    order = [steps.index(step) for step in ("ruff check .", "ruff format --check .", "/mypy", "/pytest")]
    assert order == sorted(order)
    assert ("not slow" in steps) == (target == "check")


@pytest.mark.parametrize(("version", "says"), [("3.10.4", "needs Python 3.11 or newer, and"), (None, "There is no")])
def test_a_python_that_is_too_old_or_missing_is_named_in_one_line(clone: Path, version: str | None, says: str) -> None:
    python = clone / "python"
    if version is not None:
        python.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo Python {version} && exit\nexit 1\n')
        python.chmod(0o755)
    done = make("demo", f"PYTHON={python}", folder=clone)
    assert done.returncode != 0
    first = done.stderr.splitlines()[0]
    assert says in first
    assert (version or str(python)) in first
    assert not (clone / ".venv").exists()


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")
    assert re.findall(r"^make ([\w-]+)", script.read_text(encoding="utf-8"), re.MULTILINE) == ["test"]


def test_the_hooks_are_valid_and_run_the_pinned_tools() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-config"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
