"""The encoders of the `structure` family as torch modules, which GRPO trains by gradients."""

from __future__ import annotations

from langchain_rcr.families.encoder import Encoder
from langchain_rcr.families.structure.needs import NumpyNeedEncoder
from langchain_rcr.families.structure.shown import NumpyProgramEncoder


class NeedEncoder(NumpyNeedEncoder, Encoder):
    """`NumpyNeedEncoder`, trainable."""


class ProgramEncoder(NumpyProgramEncoder, Encoder):
    """`NumpyProgramEncoder`, trainable."""
