"""How often the training state is written, and how the learning rate changes."""

from rcr_trainer.training import runner
from training import train_line


def test_writing_takes_a_twentieth_of_the_time_at_most(tmp_path, monkeypatch):
    clock, saved = [0.0], []
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    save = runner.save_file

    def slow(*arguments):
        saved.append(clock[0])
        clock[0] += 5.0
        save(*arguments)

    def second():
        clock[0] += 1.0
        return {}

    monkeypatch.setattr(runner, "save_file", slow)
    result = train_line(tmp_path / "s", 300, evaluate=second)
    # 20 s after the start, then 20 × 5 s after each write of 5 s, and at the end.
    assert saved == [20.0, 125.0, 230.0, 316.0]
    assert repr(train_line(tmp_path / "s", 300)) == repr(result)


def test_the_learning_rate_climbs_and_falls():
    assert [runner.linear(step, 10, 0.0) for step in (0, 5, 10)] == [1.0, 0.5, 0.0]
    assert [round(runner.linear(step, 10, 0.2), 3) for step in (0, 1, 2, 6, 10)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    # A climb of half a step, or of one and a half, goes no higher.
    assert [runner.linear(step, 10, 0.05) for step in (0, 10)] == [1.0, 0.0]
    assert max(runner.linear(step, planned, 0.05) for planned in (1, 2, 30, 50) for step in range(planned)) == 1.0
