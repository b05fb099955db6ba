"""Selectors that know tables and columns: what is masked, what links, DAIL-SQL's selection and BM25 by hand."""

import numpy as np
import pytest
from rcr_trainer.baselines.linking import (
    BM25SchemaSelector,
    DAILSQLSelector,
    mask_question,
    program_words,
    schema_words,
)
from toys import tuned

from langchain_rcr.programs import ProgramSpec

SPEC = ProgramSpec(language="sql:sqlite")
SCHEMA = """CREATE TABLE Student (StuID number, city_code text, PRIMARY KEY (StuID));
-- values: 1, 2 | 'paris'
CREATE TABLE "home towns" (mayor text, FOREIGN KEY (mayor) REFERENCES Student(StuID));"""


def test_words_of_a_schema_and_of_a_program():
    assert schema_words(SCHEMA) == {"student", "stu", "id", "city", "code", "home", "town", "mayor"}
    sql = "SELECT T1.cityCode, count(*) FROM Students AS T1 JOIN pets ON T1.id = pets.id WHERE pets.kind = 'city dog'"
    assert sorted(set(program_words(sql, "sql"))) == ["citycode", "id", "kind", "pet", "student"]
    assert program_words("not sql (", "sql") == []
    assert program_words("largest ( state ( all ) )", "functional") == []


@pytest.mark.parametrize(
    ("question", "masked"),
    [
        ("How many students are there?", "How many <mask> are there ?"),
        ("Show the city codes of each student", "Show the <mask> of each <mask>"),
        ("mayors of home towns", "<mask> of <mask>"),
        ("students older than 30.5, in 'Home Town'", "<mask> older than <unk> , in <unk>"),
        ('those with code "A 1"', "those with <mask> <unk>"),
        ("the student's mayor", "the <mask> ' s <mask>"),
        ("", ""),
    ],
)
def test_questions_are_masked(question, masked):
    assert mask_question(question, schema_words(SCHEMA)) == masked


def test_questions_without_spaces_and_with_marks_are_masked():
    names = schema_words("CREATE TABLE 河流 (长度 INT, नदी TEXT)")
    assert mask_question("长度超过500公里的河流?", names) == "<mask> 超 过 <unk> 公 里 的 <mask> ?"
    assert mask_question("हर नदी का", names) == "हर <mask> का"


EXAMPLES = [
    {"source": "how many singers", "target": "SELECT count(*) FROM singer"},
    {"source": "names of dogs", "target": "SELECT name FROM dog"},
    {"source": "how many cats", "target": "SELECT count(*) FROM cat", "schema": "CREATE TABLE cat (a text);"},
    {"source": "dogs by age", "target": "SELECT name FROM dog ORDER BY age"},
    {"source": "how many dogs older than 3", "target": "SELECT count(*) FROM dog WHERE age > 3"},
]


def embed(texts):
    """A dimension a word, so that masked questions that are equal have a cosine of 1."""
    vectors = np.zeros((len(texts), 97), dtype=np.float32)
    for row, text in enumerate(texts):
        for word in text.split():
            vectors[row, sum(word.encode()) % 97] += 1
    return vectors


def test_dail_sql_masks_and_puts_the_likely_skeleton_first():
    options = {"spec": SPEC, "embed": embed, "schemas": {"how many trees": "CREATE TABLE tree (a text);"}}
    picked = tuned(DAILSQLSelector(EXAMPLES, **options), threshold=1.0).pick(["how many trees"], 5)[0].tolist()
    assert picked[:2] == [0, 2]  # "how many <mask>"; the skeleton of the first is theirs alone
    assert picked[2] == 4  # of the others the question that is most alike
    some = tuned(DAILSQLSelector(EXAMPLES, **options), threshold=0.5)
    assert some.pick(["how many trees"], 3)[0].tolist() == [0, 2, 4]
    # Without the likeliest skeleton the order is that of masked questions.
    assert some.pick(["how many trees"], 2, [[0, 2]])[0].tolist()[0] == 4
    some.add_example({"source": "how many birds", "target": "SELECT count(*) FROM bird"})
    assert some.pick(["how many trees"], 3)[0].tolist() == [0, 2, 5]


def test_bm25_counts_the_names_of_programs_and_a_querys_names_twice():
    selector = BM25SchemaSelector(EXAMPLES, spec=SPEC)
    assert selector.pick(["who sings"], 1)[0].tolist() == [0]  # nothing is shared: the lowest
    assert selector.pick(["their ages"], 1)[0].tolist() == [3]
    rows = [*EXAMPLES, {"source": "which are old", "target": "SELECT kennel FROM dog"}]
    assert BM25SchemaSelector(rows, spec=SPEC).pick(["kennels"], 1)[0].tolist() == [5]  # from its program alone
    rows = [{"source": text, "target": "a"} for text in ("old dogs", "old cats", "other things", "more")]
    for schemas, expected in (({}, 0), ({"dog, cat": "CREATE TABLE cat (age text);"}, 1)):
        assert BM25SchemaSelector(rows, spec=ProgramSpec(), schemas=schemas).pick(["dog, cat"], 1)[0, 0] == expected
