"""A policy as a checkpoint folder: how it is written, and how it is read after its integrity has been checked."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

from langchain_rcr.basics.extras import library_versions
from langchain_rcr.basics.files import atomic_directory, read_json, write_json, write_text
from langchain_rcr.basics.section import unknown
from langchain_rcr.errors import CheckpointError, InputError, refusing
from langchain_rcr.families import backbone as backbones
from langchain_rcr.families import families, get_family
from langchain_rcr.families.base import PARTS
from langchain_rcr.families.state import STATES, make_state
from langchain_rcr.policy.hub import model_card
from langchain_rcr.policy.manifest import CARD, inside, seal, stranger, verify
from langchain_rcr.policy.prompt import Prompt
from langchain_rcr.programs import ProgramSpec

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

    from langchain_rcr.policy.triencoder import TriEncoder

Runtime: TypeAlias = Literal["torch", "onnx", "onnx-int8"]
"""What computes: torch, which can also train; or ONNX Runtime and NumPy, optionally with the text encoder in int8."""
FORMAT_VERSION = 12
"""Increase it whenever the meaning of what is saved changes, be it a weight or a constant used in fitting."""
_TOP_LEVEL = ("lam", "tau", "state")
"""Settings at the top level of tri_encoder.json, beside the others."""
_FIELDS = ("group", "prefer")
ModelT = TypeVar("ModelT", bound="TriEncoder")


def save(model: TriEncoder, folder: Path, runtime: Runtime | None) -> None:
    """See `TriEncoder.save_pretrained`."""
    _check_runtime(runtime)
    check_folder(folder)
    for_onnx = (runtime or model.runtime or "torch") != "torch"
    with atomic_directory(folder) as path:
        for part, encoder in zip(PARTS, model.encoders, strict=True):
            (path / f"{part}_encoder").mkdir()
            encoder.save(path / f"{part}_encoder")
        if model.backbone is not None:
            backbones.save_backbone(model.backbone, path, onnx=for_onnx, int8=runtime == "onnx-int8")
        meta = {
            "format": "langchain-rcr tri-encoder",
            "format_version": FORMAT_VERSION,
            "family": model.family.name,
            "settings": model.config.model_dump(mode="json", exclude={"family", *_TOP_LEVEL}),
            "dim": model.dim,
            **model.config.model_dump(include=set(_TOP_LEVEL)),
            "spec": model.spec.to_json(),
            "prompt": None if model.prompt is None else model.prompt.model_dump(),
            **{name: getattr(model, name) for name in _FIELDS},
            "fingerprint": model.fingerprint(),
            "versions": library_versions(),
        }
        if for_onnx:
            meta["runtime"] = "onnx"
        write_json(path / "tri_encoder.json", meta)
        write_text(path / CARD, model.card or model_card(model.config, model.spec))
        seal(path)


def check_folder(folder: Path) -> None:
    """Raise an `InputError` unless a checkpoint may take the place of what is there."""
    if os.path.ismount(os.path.realpath(folder)):
        raise InputError(f"{folder} is a mount point, which can't be replaced as a whole: give a folder inside it")
    other = stranger(folder) if folder.is_dir() else None
    if other is not None:
        raise InputError(f"{folder} holds {other}, which isn't a checkpoint's and would be lost: give a new folder")


def load(
    kind: type[ModelT],
    path: Path,
    embeddings: Embeddings | None,
    trust: bool | Collection[str],
    runtime: Runtime | None,
) -> ModelT:
    """See `TriEncoder.from_pretrained`."""
    _check_runtime(runtime)
    meta = _read_meta(path)
    with refusing(f"{path}", CheckpointError):
        family = get_family(str(meta["family"]))
        if meta["state"] not in STATES:
            families()  # one of another distribution comes with its family
        make_state(str(meta["state"]), 0.0)
        spec = ProgramSpec.from_json(meta["spec"])
        saved_for: Runtime | None = "onnx" if meta.get("runtime") == "onnx" else None
        runtime = runtime or saved_for
        kinds = family.kinds(numpy=runtime != "torch")
    there, torch = (path / "backbone.json").is_file(), None if runtime is None else runtime == "torch"
    backbone = backbones.load_backbone(path, embeddings, trust, torch=torch) if there else None
    with refusing(f"{path} is damaged", CheckpointError):
        config = family.settings(**meta["settings"], **{name: meta[name] for name in _TOP_LEVEL})
        parts = zip(PARTS, kinds, strict=True)
        query, context, candidate = (each.load(path / f"{part}_encoder", backbone) for part, each in parts)
        model = kind(query, context, candidate, config, spec)
        model.prompt = None if meta.get("prompt") is None else Prompt.model_validate(meta["prompt"])
        for name in _FIELDS:
            setattr(model, name, None if meta.get(name) is None else str(meta[name]))
        model.runtime = saved_for
        if (path / CARD).is_file():
            model.card = inside(path, CARD).read_text(encoding="utf-8", errors="replace")
    if model.fingerprint() != meta["fingerprint"]:
        raise CheckpointError(
            f"{path}: the weights are not those that tri_encoder.json was written for (files of two checkpoints?)"
        )
    return model.eval()


def _check_runtime(runtime: str | None) -> None:
    if runtime is not None and runtime not in get_args(Runtime):
        raise InputError(f"runtime: {unknown(runtime, get_args(Runtime))}")


def _read_meta(path: Path) -> dict[str, Any]:
    """tri_encoder.json, once it is clear that this version reads it and that all files are as saved."""
    if not path.is_dir():
        what = "a file, not a folder" if path.exists() else "no such folder (one on the hub is hub:ORG/NAME)"
        raise CheckpointError(f"{path} is not a checkpoint: {what}")
    file = inside(path, "tri_encoder.json")
    meta = read_json(file, ("format_version",))
    if meta["format_version"] != FORMAT_VERSION:
        versions = meta.get("versions")
        written = versions.get("langchain-rcr", "unknown") if isinstance(versions, dict) else "unknown"
        older = isinstance(meta["format_version"], int) and meta["format_version"] < FORMAT_VERSION
        advice = "train it again, or install that version" if older else "upgrade langchain-rcr"
        raise CheckpointError(
            f"{path} has format {meta['format_version']} (written by langchain-rcr {written}); this version reads "
            f"format {FORMAT_VERSION}: {advice}"
        )
    verify(path)
    return read_json(file, ("family", "settings", "dim", *_TOP_LEVEL, "spec", "fingerprint"))
