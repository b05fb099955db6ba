"""The doors of the house: which room may import from which (imports go down only)."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from rcr_trainer import baselines

import langchain_rcr
from langchain_rcr.families import family_names

ROOT = Path(__file__).parent.parent
HOMES = {"langchain_rcr": ROOT / "langchain_rcr", "rcr_trainer": ROOT / "trainer" / "rcr_trainer"}

# Rooms on one line may use each other as long as they don't do so in a circle.
LEVELS = {
    "langchain_rcr": [
        ["errors"],
        ["basics"],
        ["programs", "databases"],
        ["families"],
        ["index"],
        ["policy"],
        ["pool"],
        ["retriever"],
        ["chains", "agents"],
        ["__init__"],
    ],
    "rcr_trainer": [
        ["errors", "__init__"],
        [
            "rewards",
            "llm",
            "baselines",
            "data",
            "training",
            "settings",
        ],
        ["runs"],
        ["sft", "race", "grpo", "evaluation"],
        ["pipeline"],
        ["paper"],
        ["cli"],
    ],
}
LANGCHAIN = {
    "langchain_rcr": (
        "agents.py",
        "retriever.py",
        "chains/",
        "families/backbone.py",
        "index/vectorstore.py",
        "index/documents.py",
        "pool/making.py",
    ),
    "rcr_trainer": ("llm/", "baselines/"),
}
ARRAYS_ONLY = ("langchain_rcr/families/state.py", "langchain_rcr/policy/selection.py")


@dataclass(frozen=True)
class Door:
    """One import: `file` (relative to its package's parent) takes `module`, or a name in it."""

    file: str
    line: int
    module: str
    names: tuple[str, ...]
    typing_only: bool
    at_import: bool

    @property
    def package(self) -> str:
        return self.file.split("/")[0]

    @property
    def room(self) -> str:
        return self.file.split("/")[1].removesuffix(".py")

    def rooms(self, package: str, known: list[str]) -> list[str]:
        """The rooms of `package` that this import enters."""
        parts = self.module.split(".")
        if parts[0] != package:
            return []
        if len(parts) > 1:
            return [parts[1]]
        return [name if name in known else "__init__" for name in self.names] or ["__init__"]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, which several tests walk."""
    return ast.parse(path.read_text(encoding="utf-8"))


def doors_of(homes: dict[str, Path]) -> list[Door]:
    doors = []
    for home in homes.values():
        for path in sorted(home.rglob("*.py")):
            _walk(parsed(path), path.relative_to(home.parent), doors, False, True)
    return doors


def _walk(node: ast.AST, file: Path, doors: list[Door], typing_only: bool, at_import: bool) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # most of a file, and nothing in it imports
            continue
        if isinstance(child, ast.Import):
            found = [(alias.name, ()) for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            base = ".".join(file.parent.parts[: len(file.parent.parts) + 1 - child.level]) if child.level else ""
            module = ".".join(part for part in (base, child.module) if part)
            found = [(module, tuple(alias.name for alias in child.names))]
        else:
            found = []
            inside = not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            guard = isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            if guard:
                for statement in child.body:
                    _walk(ast.Module([statement], []), file, doors, True, at_import)
                for statement in child.orelse:
                    _walk(ast.Module([statement], []), file, doors, typing_only, at_import)
            else:
                _walk(child, file, doors, typing_only, at_import and inside)
        for module, names in found:
            doors.append(Door(file.as_posix(), child.lineno, module, names, typing_only, at_import))


def offences(doors: list[Door], levels: dict[str, list[list[str]]] = LEVELS) -> list[str]:
    """What no door in the design allows, one line each."""
    wrong = []
    sideways: dict[tuple[str, str], set[str]] = {}
    for door in doors:
        top = door.module.split(".")[0]
        level = {room: n for n, rooms in enumerate(levels[door.package]) for room in rooms}
        if door.room not in level:
            wrong.append(f"{door.file}: no such room in the design; give it a level")
            continue
        if door.package == "langchain_rcr" and top == "rcr_trainer":
            wrong.append(f"{door}: serving knows no trainer")
        if door.package == "rcr_trainer" and top == "langchain_rcr":
            private = [part for part in (*door.module.split("."), *door.names) if part.startswith("_")]
            wrong += [f"{door}: {name} is private" for name in private]
        if top == "langchain_core" and not door.typing_only:
            inner = door.file.split("/", 1)[1]
            if not inner.startswith(LANGCHAIN[door.package]):
                wrong.append(f"{door}: LangChain has no business in this room")
        for room in door.rooms(door.package, list(level)):
            if room == door.room:
                continue
            if {room, door.room} <= {"sft", "race", "grpo"}:
                wrong.append(f"{door}: sft, race and grpo don't know each other")
            elif room not in level:
                wrong.append(f"{door}: no room {room} in the design")
            elif level[room] > level[door.room]:
                wrong.append(f"{door}: imports go down only")
            elif level[room] == level[door.room]:
                sideways.setdefault((door.package, door.room), set()).add(room)
    return list(dict.fromkeys(wrong)) + _circles(sideways)


def _circles(sideways: dict[tuple[str, str], set[str]]) -> list[str]:
    def reach(package: str, room: str) -> set[str]:
        seen, todo = set(), [room]
        while todo:
            for following in sideways.get((package, todo.pop()), set()) - seen:
                seen.add(following)
                todo.append(following)
        return seen

    return [
        f"{package}: {room} imports itself by way of others"
        for package, room in sideways
        if room in reach(package, room)
    ]


def loaded_by(file: str, doors: list[Door]) -> set[str]:
    """The names of the foreign packages that importing `file` loads, through our own modules too."""
    files = {door.file for door in doors}
    foreign, seen, todo = set(), set(), [file]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        for door in doors:
            if door.file != current or door.typing_only or not door.at_import:
                continue
            own = door.module.replace(".", "/")
            inner = [path for path in (f"{own}.py", f"{own}/__init__.py") if path in files]
            inner += [path for name in door.names for path in (f"{own}/{name}.py",) if path in files]
            todo += inner
            if door.module.split(".")[0] not in HOMES:
                foreign.add(door.module.split(".")[0])
    return foreign


@pytest.fixture(scope="module")
def doors() -> list[Door]:
    return doors_of(HOMES)


def test_every_import_goes_through_a_door_of_the_design(doors: list[Door]) -> None:
    assert offences(doors) == []


def test_the_files_of_families_import_each_other_in_no_circle(doors: list[Door]) -> None:
    graph: dict[str, set[str]] = {}
    for door in doors:  # those of typing and within functions, too
        if Path(door.file).parent.as_posix() == "langchain_rcr/families":
            graph.setdefault(door.file, set()).add(f"{door.module.replace('.', '/')}.py")
    assert "langchain_rcr/families/encoder.py" in graph["langchain_rcr/families/pooled.py"]
    TopologicalSorter(graph).prepare()  # raises an error at a circle


@pytest.mark.parametrize("file", ARRAYS_ONLY)
def test_array_code_loads_neither_langchain_nor_transformers(doors: list[Door], file: str) -> None:
    assert any(door.file == file for door in doors)
    assert not loaded_by(file, doors) & {"langchain_core", "langchain", "transformers", "sentence_transformers"}


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("langchain_rcr/pool/examples.py", "from rcr_trainer.data.examples import Example", "serving knows no trainer"),
        ("langchain_rcr/pool/examples.py", "import langchain_core.documents", "LangChain has no business"),
        ("langchain_rcr/families/embeddings.py", "import langchain_core", "LangChain has no business"),
        ("langchain_rcr/index/memory.py", "from langchain_rcr.retriever import Pick", "down only"),
        ("langchain_rcr/families/state.py", "from ..policy.selection import greedy", "down only"),
        ("langchain_rcr/families/state.py", "from langchain_rcr import TriEncoder", "down only"),
        ("langchain_rcr/families/base.py", "def f():\n    from ..pool import ExamplePool", "down only"),
        ("langchain_rcr/novel.py", "import json", "no such room"),
        ("rcr_trainer/sft.py", "from rcr_trainer.grpo import train", "don't know each other"),
        ("rcr_trainer/grpo.py", "from rcr_trainer import sft", "don't know each other"),
        ("rcr_trainer/grpo.py", "from rcr_trainer.race import race", "don't know each other"),
        ("rcr_trainer/data/covr.py", "from rcr_trainer.evaluation import evaluate", "down only"),
        ("rcr_trainer/rewards/reward.py", "from rcr_trainer import cli", "down only"),
        ("rcr_trainer/evaluation/table.py", "from langchain_core.documents import Document", "LangChain has no"),
        ("rcr_trainer/sft.py", "from langchain_rcr.index._memory import x", "private"),
    ],
)
def test_a_wrong_door_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    assert [complaint in offence for offence in offences(_built(tmp_path, {file: line}))] == [True]


def test_a_circle_on_one_level_is_found(tmp_path: Path) -> None:
    files = {
        "rcr_trainer/data/a.py": "from rcr_trainer.training.registry import StageSettings",
        "rcr_trainer/training/registry.py": "import rcr_trainer.rewards.reward",
        "rcr_trainer/rewards/reward.py": "from rcr_trainer.data.examples import Example",
    }
    assert len(offences(_built(tmp_path, files))) == 3
    del files["rcr_trainer/rewards/reward.py"]
    assert offences(_built(tmp_path / "open", files)) == []


def test_what_a_file_loads_is_followed_through_others(tmp_path: Path) -> None:
    files = {
        "langchain_rcr/families/state.py": "import numpy\n"
        "from langchain_rcr.basics.items import Item\ndef f():\n    import torch",
        "langchain_rcr/basics/items.py": "import transformers",
    }
    assert loaded_by("langchain_rcr/families/state.py", _built(tmp_path, files)) == {"numpy", "transformers"}


def _built(folder: Path, files: dict[str, str]) -> list[Door]:
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return doors_of({package: folder / package for package in HOMES})


# ---------------------------------------------------------------- nothing outside a registry's room knows a name in it

ENGINES = {name for name in langchain_rcr.__all__ if name.endswith("Index")}
NAMES = {
    "langchain_rcr/families/": set(family_names()),
    "langchain_rcr/index/": ENGINES,
    "rcr_trainer/baselines/": set(baselines.BASELINES),
}
KNOWN = {
    ("langchain_rcr/pool/making.py", "VectorStoreIndex"),  # what LangChain's `from_examples` takes
    *(("langchain_rcr/__init__.py", name) for name in ENGINES),
    ("langchain_rcr/pool/store.py", "MemoryIndex"),  # the default engine
    ("langchain_rcr/index/documents.py", "embeddings"),  # an attribute of LangChain's vector stores
    ("langchain_rcr/families/bert.py", "bert"),  # an architecture, as a config.json of Hugging Face's names it
    # A kind of selector, whatever its name:
    *((f"rcr_trainer/evaluation/{file}.py", "oracle") for file in ("harness", "report", "table")),
}
"""File and name: who may know it all the same."""


def names_known(homes: dict[str, Path]) -> list[str]:
    """Names of a registry that are used outside its room, one line each."""
    found = []
    for home in homes.values():
        for path in sorted(home.rglob("*.py")):
            file = path.relative_to(home.parent).as_posix()
            for name, line in _names_in(parsed(path)):
                room = next((room for room, names in NAMES.items() if name in names), None)
                if room and not file.startswith(room) and (file, name) not in KNOWN:
                    found.append(f"{file}:{line} knows {name!r} of {room}")
    return found


def _names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """String literals and the names of engines, with their lines; `__all__` and defaults of fields are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            continue
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Field", "_field"):
            continue
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in ENGINES)
        elif isinstance(node, ast.Name) and node.id in ENGINES:
            yield node.id, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, node.lineno
        yield from _names_in(node)


def test_nothing_outside_a_registry_knows_its_names() -> None:
    assert names_known(HOMES) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        (
            "langchain_rcr/policy/triencoder.py",
            "if family.name == 'lexical': pass",
            "knows 'lexical' of langchain_rcr/families/",
        ),
        (
            "rcr_trainer/cli/command.py",
            "from langchain_rcr import FaissIndex",
            "knows 'FaissIndex' of langchain_rcr/index/",
        ),
        ("rcr_trainer/evaluation/plain.py", "BEST = {'set_bsr': 1}", "knows 'set_bsr' of rcr_trainer/baselines/"),
    ],
)
def test_a_name_known_elsewhere_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    _built(tmp_path, {file: line})
    assert [complaint in found for found in names_known({package: tmp_path / package for package in HOMES})] == [True]
