"""Sets of names: the language `set`."""

import pytest

from langchain_rcr.programs import ProgramSpec, parse

SPEC = ProgramSpec("set", anonymize=False, max_size=1)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ('["b", "a", "b"]', "set(a, b)"),
        ('["search flights, v2"]', "set(search flights\\, v2)"),
        ("[]", "set"),
        *((text, "None") for text in ("", "a, b", "[a]", '"a"', "[1]", '["a", 1]', '[" "]', '[["a"]]', "[" * 100_000)),
    ],
)
def test_a_json_list_of_strings_is_a_set(text: str, tree: str) -> None:
    assert str(parse(text, "set")) == tree


def test_each_name_is_a_structure_whatever_it_looks_like() -> None:
    assert SPEC.structures('["12", "get -> all", "x"]') == {"set", "12", "get -\\> all", "x"}
    assert SPEC.key('["b", "a"]') == SPEC.key('["a", "b", "a"]')
