"""A language model for tests that puts together what its prompt shows: as a LangChain LLM, and on loopback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.language_models import LLM
from openai_server import OpenAIServer
from rcr_trainer.data.covr import covr_split

from langchain_rcr.programs import ProgramSpec

PAIRS = ProgramSpec(max_size=2)


class Composing(LLM):
    """Gives the gold program where the examples in its prompt together show all its structures.

    Elsewhere it repeats the example that shows most of them, which is wrong.

    Attributes:
        programs: question → gold program.
        spec: how programs are read, and which structures count.
    """

    programs: Mapping[str, str]
    spec: ProgramSpec = PAIRS

    @property
    def _llm_type(self) -> str:
        return "composing"

    def answer(self, prompt: str) -> str:
        """What it says to a prompt in the paper's format."""
        *examples, asked = (part.partition("\nTarget:") for part in prompt.split("Source: ")[1:])
        gold, shown = self.programs[asked[0]], [program.strip() for _, _, program in examples]
        needed = self.spec.structures(gold)
        shares = [self.spec.structures(program) & needed for program in shown]
        if needed <= frozenset().union(*shares):
            return gold
        return max(zip(map(len, shares), shown, strict=True))[1] if shown else "none ( )"

    def _call(self, prompt: str, *_: Any, **__: Any) -> str:
        return self.answer(prompt)

    async def _acall(self, prompt: str, *_: Any, **__: Any) -> str:
        return self.answer(prompt)


def answering(programs: Mapping[str, str] | None = None, spec: ProgramSpec = PAIRS) -> OpenAIServer:
    """A server that answers as `Composing` does, by default the questions of small runs on COVR's split 110."""
    if programs is None:
        split = covr_split("110", 0, 100, 50)
        programs = {example.source: example.target for example in (*split.train, *split.test)}
    return OpenAIServer(Composing(programs=programs, spec=spec).answer)


def asks(server: OpenAIServer) -> list[str]:
    """The flags by which a run asks a server, in the comparison, too."""
    return ["--llm.model=m", f"--llm.base_url={server.base_url}", "--evaluation.answers=true"]
