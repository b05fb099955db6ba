"""`--resume` with more epochs: a run goes on to its new end, and ends like one that had them from the start."""

from pathlib import Path

import pytest
import warm
from rcr_trainer import cli
from rcr_trainer.runs.folder import Run

from langchain_rcr.policy.triencoder import TriEncoder

pytestmark = pytest.mark.slow

CONFIG = """
data: {split: 110, train_size: 40, test_size: 8, dev_size: 8}
model: {family: lexical, dim: 16}
sft: {epochs: 2, keep: last, schedule: constant, warmup: 0, on_policy: 0}
grpo: {epochs: 1, keep: last, group_size: 4, lr: 0.01, schedule: constant}
reward: {names: [context_coverage]}
evaluation: {steps: 4, selectors: [random]}
tensorboard: false
threads: 1
"""
SFT, GRPO = ["sft", "demo.yaml"], ["run", "demo.yaml", "--grpo.enabled=true"]


@pytest.fixture(autouse=True)
def here(here: Path) -> Path:
    (here / "demo.yaml").write_text(CONFIG, encoding="utf-8")
    return here / "runs"


def weights(folder: Path) -> str:
    return TriEncoder.from_pretrained(folder / "checkpoint").fingerprint()


def curve(folder: Path, stage: str) -> list[dict[str, float]]:
    return [{name: v for name, v in row.items() if name != "time"} for row in Run.open(folder).metrics(stage)]


def done(*words: str) -> None:
    assert cli.main(list(words)) == 0


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main(list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_finished_run_goes_on_to_more_epochs(capsys, here):
    done(*SFT, "--name=whole", "--sft.epochs=5")
    done(*SFT, "--name=longer")
    assert weights(here / "longer") != weights(here / "whole")
    assert "sft.epochs (2, now 5); --resume goes on" in refused(capsys, *SFT, "--name=longer", "--sft.epochs=5")
    done(*SFT, "--name=longer", "--sft.epochs=5", "--resume")
    assert "resumes with the learning rates of its new length" not in capsys.readouterr().err
    assert weights(here / "longer") == weights(here / "whole")
    assert curve(here / "longer", "sft") == curve(here / "whole", "sft")
    assert Run.open(here / "longer").config.sft.epochs == 5
    done(*SFT, "--name=longer", "--sft.epochs=5")  # nothing is left to do
    lowered = refused(capsys, *SFT, "--name=longer", "--sft.epochs=4", "--resume")
    assert "sft.epochs can't be lowered in a run that was begun (5, now 4)" in lowered


def test_a_run_that_was_killed_goes_on_to_more_epochs(here):
    kill = (
        "import os, signal, sys\nfrom rcr_trainer import cli\nfrom rcr_trainer.runs import folder as runs\n"
        "from rcr_trainer.training import state\n"
        "state.SAVE_EVERY_S = 0\nlog = runs.Run.log\n"
        "def die(self, stage, step, figures):\n"
        "    log(self, stage, step, figures)\n"
        "    if step == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "runs.Run.log = die\ncli.main(sys.argv[1:])"
    )
    words = [*SFT, "--name=killed", "--sft.epochs=3"]
    result = warm.run("-c", kill, *words)
    assert result.returncode == -9, result.stderr
    done(*SFT, "--name=killed", "--sft.epochs=5", "--resume")
    done(*SFT, "--name=whole", "--sft.epochs=5")
    assert weights(here / "killed") == weights(here / "whole")
    assert curve(here / "killed", "sft") == curve(here / "whole", "sft")


def test_grpo_goes_on_and_is_evaluated_again(here):
    done(*GRPO, "--name=whole", "--grpo.epochs=3")
    done(*GRPO, "--name=longer")
    done(*GRPO, "--name=longer", "--grpo.epochs=3", "--resume")
    assert weights(here / "longer") == weights(here / "whole")
    assert curve(here / "longer", "grpo") == curve(here / "whole", "grpo")
    figures = [Run.open(here / name).path.joinpath("picks.jsonl").read_bytes() for name in ("longer", "whole")]
    assert figures[0] == figures[1]


def test_more_epochs_of_sft_let_grpo_begin_again(here):
    done(*GRPO, "--name=whole", "--sft.epochs=3")
    done(*GRPO, "--name=longer")
    done(*GRPO, "--name=longer", "--sft.epochs=3", "--resume")
    assert weights(here / "longer") == weights(here / "whole")
    assert curve(here / "longer", "grpo") == curve(here / "whole", "grpo")


def test_a_schedule_that_depends_on_the_length_is_said(capsys, here):
    done(*SFT, "--sft.schedule=linear")
    done(*SFT, "--sft.schedule=linear", "--sft.epochs=3", "--resume")
    assert "the result is not that of a run of this length (sft.schedule: constant" in capsys.readouterr().err
    assert [row["step"] for row in Run.open(here / "demo").metrics("sft")] == [0, 1, 2, 3]


def test_without_a_training_state_there_is_nothing_to_go_on_from(capsys, here):
    done(*SFT, "--keep_state=false")
    assert not (here / "demo" / "state").exists()
    assert "keeps no training state of sft" in refused(capsys, *SFT, "--sft.epochs=3", "--resume")
    assert Run.open(here / "demo").config.sft.epochs == 2
    done(*SFT)


def test_what_changes_no_result_is_written_down_when_a_run_is_continued(here):
    done(*SFT, "--llm.budget_calls=10")
    done(*SFT, "--llm.budget_calls=20", "--resume")
    assert Run.open(here / "demo").config.llm.budget_calls == 20
