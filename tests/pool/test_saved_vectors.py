"""The file of a pool's vectors: what comes back, and what is refused with a word on what to rebuild."""

import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from langchain_rcr.errors import CheckpointError
from langchain_rcr.index.base import PoolVectors
from langchain_rcr.pool.saved import load_vectors, save_vectors

IDS = ["a", "b", "ü"]


@pytest.fixture
def pool():
    return PoolVectors(*np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32))


@pytest.fixture
def file(tmp_path, pool):
    save_vectors(tmp_path / "pool.safetensors", "one", IDS, pool, np.arange(len(IDS)))
    return tmp_path / "pool.safetensors"


def test_what_was_written_comes_back(file, pool):
    again, programs = load_vectors(file, "one", tuple(IDS))
    np.testing.assert_array_equal(again.candidate, pool.candidate)
    np.testing.assert_array_equal(programs, [0, 1, 2])
    np.testing.assert_array_equal(again.context, pool.context)
    assert [path.name for path in file.parent.iterdir()] == ["pool.safetensors"]


def test_an_empty_pool_and_a_part_of_a_matrix(tmp_path, pool):
    for rows in (slice(0, 0), slice(None, None, 2)):
        part, ids = PoolVectors(pool.candidate[rows], pool.context[rows]), IDS[rows]
        save_vectors(tmp_path / "x", "one", ids, part, np.arange(len(ids)))
        np.testing.assert_array_equal(load_vectors(tmp_path / "x", "one", ids)[0].context, part.context)


@pytest.mark.parametrize(
    ("fingerprint", "ids", "message"),
    [
        ("two", IDS, r"is of another encoder \(one, not two\)"),
        ("one", ["a", "b"], r"belongs to other examples than those of the pool \(3, not 2\)"),
        ("one", ["b", "a", "ü"], "belongs to other examples"),
        ("one", ["ab", "", "ü"], "belongs to other examples"),
    ],
)
def test_what_does_not_belong_is_refused(file, fingerprint, ids, message):
    with pytest.raises(CheckpointError, match=rf"pool\.safetensors {message}.*: .*encode the examples again"):
        load_vectors(file, fingerprint, ids)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match=r"is missing: .*encode the examples again"):
            load_vectors(path, "one", IDS)


@pytest.mark.parametrize("at", [0, 3, 8, 60, 300, -1])
def test_a_cut_file_is_damaged(file, at):
    file.write_bytes(file.read_bytes()[:at])
    with pytest.raises(CheckpointError, match=r"is damaged"):
        load_vectors(file, "one", IDS)


@pytest.mark.parametrize("content", [b"", b"\x80\x05K\x01.", b"{}", b"\xff" * 400, b"\x02\0\0\0\0\0\0\0{}"])
def test_a_foreign_file_is_refused(file, content):
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged|holds no vectors of a pool"):
        load_vectors(file, "one", IDS)


def header(file):
    from safetensors import safe_open

    with safe_open(file, "numpy") as opened:
        return opened.metadata()


@pytest.mark.parametrize("what", ["nan", "double", "names", "rows", "shapes", "dim", "programs", "no header"])
def test_a_file_whose_tensors_are_not_as_written_is_refused(file, what):
    meta, tensors = header(file), load_file(file)
    if what == "nan":
        tensors["context"][1, 2] = np.nan
    elif what == "double":
        tensors["candidate"] = tensors["candidate"].astype(np.float64)
    elif what == "names":
        tensors["third"] = tensors["context"]
    elif what == "rows":
        tensors = {name: value[:2].copy() for name, value in tensors.items()}
    elif what == "shapes":
        tensors["context"] = tensors["context"][:, :3].copy()
    elif what == "programs":
        tensors["programs"] = tensors["programs"].astype(np.int32)
    elif what == "dim":
        tensors = {name: value[..., :3].copy() for name, value in tensors.items()}
    else:
        meta = None
    save_file(tensors, file, meta)
    with pytest.raises(CheckpointError, match=r"is damaged|holds no vectors of a pool"):
        load_vectors(file, "one", IDS)


PEAK = """
import sys
from pathlib import Path
import numpy as np
from langchain_rcr.pool.saved import load_vectors, save_vectors

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
vectors, _ = load_vectors(Path(sys.argv[1]), "f", [*range(40_000)])
loaded = peak()
save_vectors(Path(sys.argv[1]), "f", [*range(40_000)], vectors, np.zeros(40_000, dtype=np.int64))
print((loaded - before) * 1024, (peak() - loaded) * 1024, vectors.candidate.nbytes + vectors.context.nbytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_and_saving_hold_the_vectors_once(tmp_path):
    rows = np.zeros((40_000, 128), dtype=np.float32)
    file = tmp_path / "pool.safetensors"
    save_vectors(file, "f", [*range(40_000)], PoolVectors(rows, rows + 1), np.zeros(40_000, dtype=np.int64))
    command = [sys.executable, "-c", PEAK, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, more, needed = map(int, done.stdout.split())
    assert grown < 1.3 * needed
    assert more < 0.3 * needed
