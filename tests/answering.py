"""Language models for tests: one that says what it is told, and one that puts together what its prompt shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from openai_server import OpenAIServer
from rcr_trainer.data import covr_split
from rcr_trainer.llm.cache import Answer
from rcr_trainer.llm.client import Model, answer_of

from langchain_rcr.policy.prompt import Conversation
from langchain_rcr.programs import ProgramSpec

PAIRS = ProgramSpec(max_size=2)


class Fake(Model):
    """Answers a prompt by `say`: with a text, or a text and how it ended; reports no tokens.

    Attributes:
        asked: the prompts, in order.
        stop: the stop sequences of the last call.
    """

    def __init__(self, say: Callable[[str], str | tuple[str, str]], name: str = "fake") -> None:
        self.say, self.name, self.identity = say, name, {"named": name}
        self.asked: list[Conversation] = []
        self.stop: Sequence[str] = ()

    async def answers(self, prompts: Sequence[Conversation], stop: Sequence[str]) -> list[Answer]:
        self.asked += prompts
        self.stop = stop
        said = [self.say(str(prompt)) for prompt in prompts]
        return [answer_of(*((each, "stop") if isinstance(each, str) else each), stop, (-1, -1)) for each in said]


class Composing(Fake):
    """Gives the gold program where the examples in its prompt together show all its structures.

    Elsewhere it repeats the example that shows most of them, which is wrong.

    Args:
        programs: question → gold program.
        spec: how programs are read, and which structures count.
    """

    def __init__(self, programs: Mapping[str, str], spec: ProgramSpec = PAIRS) -> None:
        super().__init__(self.answer, "composing")
        self.programs, self.spec = programs, spec

    def answer(self, prompt: str) -> str:
        """What it says to a prompt in the paper's format."""
        *examples, asked = (part.partition("\nTarget:") for part in prompt.split("Source: ")[1:])
        gold, shown = self.programs[asked[0]], [program.strip() for _, _, program in examples]
        needed = self.spec.structures(gold)
        shares = [self.spec.structures(program) & needed for program in shown]
        if needed <= frozenset().union(*shares):
            return gold
        return max(zip(map(len, shares), shown, strict=True))[1] if shown else "none ( )"


def answering(programs: Mapping[str, str] | None = None, spec: ProgramSpec = PAIRS) -> OpenAIServer:
    """A server that answers as `Composing` does, by default the questions of small runs on COVR's split 110."""
    if programs is None:
        split = covr_split("110", 0, 100, 50)
        programs = {example.source: example.target for example in (*split.train, *split.test)}
    return OpenAIServer(Composing(programs=programs, spec=spec).answer)


def asks(server: OpenAIServer) -> list[str]:
    """The flags by which a run asks a server, in the comparison, too."""
    return ["--llm.model=m", f"--llm.base_url={server.base_url}", "--evaluation.answers=true"]
