"""Two real processes (gloo, on this machine) make the update that one makes alone with twice the batch."""

from pathlib import Path

import pytest
import several_processes
import torch
from rcr_trainer.errors import ConfigError
from rcr_trainer.training.processes import join
from several_processes import RESUMED, TRAININGS, Processes, build, end, outcome, read, start, write_bert

from langchain_rcr.errors import CheckpointError

pytestmark = pytest.mark.slow

SCRIPT = Path(several_processes.__file__)
# A shift of all candidates alike changes no probability: its gradient is rounding, which AdamW makes large.
NO_GRADIENT = "candidate.text.model.encoder.layer.1.output.LayerNorm.bias"


@pytest.fixture
def folder(tmp_path):
    """Where two processes have left what came of all trainings; their checks of every exchange have passed, too."""
    torch.set_num_threads(1)
    write_bert(tmp_path)
    for code, out, err in end(start([SCRIPT, tmp_path, *TRAININGS]), timeout=400):
        assert (code, out, err) == (0, "", "")
    return tmp_path


# One test, since two processes take seconds to start, and pytest-xdist would start them on every worker.
def test_two_processes_update_as_one_with_twice_the_batch_and_resume_to_the_bit(folder):
    for name in TRAININGS:
        _check_update(folder, name)
    for name in RESUMED:
        _check_resumed(folder, name)
    with pytest.raises(CheckpointError, match="was written by 2 processes that trained together, and now there are 1"):
        several_processes.train(
            "grpo", TRAININGS["grpo"][1], Processes(), folder, build("grpo", 0, folder), None, folder / "state of grpo"
        )


def _check_update(folder, name):
    weights, result, rows = read(folder, name, 0)
    other, *same = read(folder, name, 1)
    assert all(torch.equal(weights[key], other[key]) for key in weights), name
    assert repr(same) == repr([result, rows])

    alone, expected, figures = outcome(name, Processes(), folder)
    before = build(name, 0, folder).state_dict()
    assert max(float((alone[key] - before[key]).abs().max()) for key in alone) > 1e-3, name
    assert (result["steps"], result["processes"]) == (expected["steps"], 2)
    exact = name == "listwise"  # the same sums in the same order
    for key, tensor in alone.items():
        if key != NO_GRADIENT:
            torch.testing.assert_close(weights[key], tensor, rtol=0, atol=0 if exact else 2e-6, msg=f"{name}: {key}")
    assert [row.keys() for row in rows] == [row.keys() for row in figures]
    for row, wanted in zip(rows, figures, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-5, nan_ok=True), name


def _check_resumed(folder, name):
    weights, result, rows = read(folder, name, 0)
    for rank in (0, 1):
        again, same, last = read(folder, f"{name} resumed", rank)
        assert all(torch.equal(weights[key], again[key]) for key in weights), name
        assert repr(same) == repr(result)
        assert 0 < len(last) < len(rows)
        assert repr(last) == repr(rows[-len(last) :])


@pytest.mark.parametrize("count", [0, 1, 2, 7, 16])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_make_up_the_whole(count, size):
    parts = [list(range(count)[Processes(rank, size).part(count)]) for rank in range(size)]
    assert [row for part in parts for row in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_process_alone_exchanges_nothing(monkeypatch):
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("a group"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join() as processes:
        assert (processes.rank, processes.size, processes.first) == (0, 1, True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with join("cuda") as processes:
        assert processes.size == 1


@pytest.mark.parametrize(
    ("environ", "device", "message"),
    [
        ({"WORLD_SIZE": "2"}, "cpu", "the environment has RANK = None: start several processes with torchrun"),
        ({"WORLD_SIZE": "two"}, "cpu", "the environment has WORLD_SIZE = two"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "mps", "several processes train on CPUs or on CUDA devices"),
    ],
)
def test_an_environment_that_cannot_be(monkeypatch, environ, device, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message), join(device):
        pytest.fail("joined")
