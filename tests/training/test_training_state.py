"""How often the training state is written."""

import torch
from rcr_trainer.training import state as training_state
from rcr_trainer.training.runner import linear
from rcr_trainer.training.state import Result, TrainingState

from langchain_rcr.basics.items import Item
from langchain_rcr.policy.triencoder import TriEncoder


def test_writing_takes_a_twentieth_of_the_time_at_most(tmp_path, monkeypatch):
    model = TriEncoder.build("lexical", [Item("a b", "f(x)")], dim=4)
    optimizer = torch.optim.AdamW(model.parameters())
    clock = [0.0]
    monkeypatch.setattr(training_state.time, "monotonic", lambda: clock[0])
    save = training_state.save_file

    def slow(*arguments):
        clock[0] += 5.0
        save(*arguments)

    monkeypatch.setattr(training_state, "save_file", slow)
    state = TrainingState(dict(model.named_parameters()), optimizer, Result("sft"))
    saved = []
    for second in range(300):
        clock[0] += 1.0
        before = clock[0]
        state.result.steps = second
        state.save(tmp_path / "s")
        if clock[0] > before:
            saved.append(before)
    assert saved == [20.0, 125.0, 230.0]  # 20 s after the start, then 20 × 5 s after each write of 5 s
    state.save(tmp_path / "s", force=True)
    other = TrainingState(dict(model.named_parameters()), optimizer, Result("sft"))
    assert other.load(tmp_path / "s")
    assert repr(other.result) == repr(state.result)


def test_the_learning_rate_climbs_and_falls():
    assert [linear(step, 10, 0.0) for step in (0, 5, 10)] == [1.0, 0.5, 0.0]
    assert [round(linear(step, 10, 0.2), 3) for step in (0, 1, 2, 6, 10)] == [0.5, 1.0, 1.0, 0.5, 0.0]
