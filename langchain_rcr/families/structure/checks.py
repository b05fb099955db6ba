"""Checks that a checkpoint's fitted arrays of a need encoder are consistent; a stranger may have written them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from langchain_rcr.errors import CheckpointError

if TYPE_CHECKING:
    from langchain_rcr.families.structure.needs import NumpyNeedEncoder


def check(encoder: NumpyNeedEncoder, file: Path) -> None:
    """Raise a `CheckpointError` if shapes of fitted tensors don't match, or one indexes beyond another.

    So does another backbone than that of the fit; LangChain's embeddings have no tokens in context.
    """
    bags, count = encoder.token_bags, encoder.landmarks.bags.starts.size - 1
    width, own = 0 if encoder.backbone is None else encoder.backbone.dim, encoder.landmarks.vectors.shape[-1]
    trained = f"{file.parents[1]} was trained over"
    if width and len(bags.anchors) and not hasattr(encoder.backbone, "read"):
        raise CheckpointError(
            f"{trained} a transformer's tokens, which LangChain embeddings don't give: load it without embeddings"
        )
    if own != width:
        raise CheckpointError(f"{trained} vectors of {own} numbers, its encoder gives {width}")
    questions = {"landmarks": count, "added": len(encoder.additions.items) if encoder.additions else 0}
    anchors, rank = len(bags.mass), bags.root.shape[-1]
    phrases = int(encoder.phrases.max()) + 1 if len(encoder.phrases) else 0
    shapes = {
        "dual": (count, len(encoder.inventory)),
        "learnt": (max(count, len(encoder.learnt)), 2),
        "speaks": (phrases + 1, len(encoder.inventory.small)),
        "token_bags.anchors": (anchors, width) if anchors else (0, 0),
        "token_bags.centre": (width,) if anchors else (0, 0),
        "token_bags.mass": (anchors,) if anchors else (0, 0),
        "token_bags.root": (anchors, rank) if anchors else (0, 0),
    }
    for name, number in questions.items():
        shapes |= {f"{name}.vectors": (number, width), f"{name}.tokens": (number, rank)}
    tensors = encoder.tensors()
    sound = {name: tensors[name].shape == shape for name, shape in shapes.items()}
    for name, number in questions.items():
        views = getattr(encoder, name)
        sound[name], sound[f"{name}.homes"] = views.bags.is_sound(number), views.homes.shape == (number,)
    if all(sound.values()):
        sound["phrases"] = bool(((encoder.phrases >= -1) & (encoder.phrases < len(encoder.phrases))).all())
        columns, pairs = len(encoder.inventory), encoder.descriptions.pairs
        sound["described"] = all(0 <= row < count and 0 <= column < columns for row, column in pairs)
    if wrong := [name for name, fits in sound.items() if not fits]:
        raise CheckpointError(f"{file} is damaged: {wrong[0]} doesn't fit the tensors beside it")
