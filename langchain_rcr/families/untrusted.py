"""Checks on files that a stranger may have written: above all, the transformers model inside a checkpoint.

transformers and tokenizers trust a model's JSON. A stranger's JSON could make them fetch another repository with the
user's token, build a model of any size, or let a text grow until memory is full. So a checkpoint may hold only the
parts that a text encoder needs, in sizes that match the checkpoint's own tensors.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from langchain_rcr.basics.files import read_json
from langchain_rcr.basics.section import show
from langchain_rcr.errors import CheckpointError, InputError, refusing

_TYPES = """
albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie eurobert
fnet gte ibert jina_embeddings_v3 longformer luke megatron-bert mobilebert modernbert mpnet mra nomic_bert
nystromformer rembert roberta roberta-prelayernorm roc_bert roformer squeezebert xlm xlm-roberta
xlm-roberta-xl yoso
"""
TEXT_ENCODERS = frozenset(_TYPES.split())
"""The `model_type`s that a checkpoint may contain: text encoders that need no second model."""
_REACHING = (
    *("attn_implementation", "_attn_implementation", "auto_map", "experts_implementation", "quantization_config"),
    *("backbone", "fusion_config", "transformers_weights"),
)
"""Keys by which a model's JSON makes transformers import or fetch code, or open other files."""
_PARTS = {
    "normalizer": "BertNormalizer Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Strip StripAccents",
    "pre_tokenizer": "BertPreTokenizer ByteLevel Digits Metaspace Punctuation Split Whitespace WhitespaceSplit",
    "post_processor": "BertProcessing ByteLevel RobertaProcessing TemplateProcessing",
    "decoder": "BPEDecoder ByteFallback ByteLevel Fuse Metaspace Replace Strip WordPiece",
    "model": "BPE Unigram WordLevel WordPiece",
}
"""The parts of a text encoder's tokenizer."""
_REPEATABLE = ("Prepend", "Replace", "Split", "Strip")
"""Parts that may occur more than once. The others are idempotent, or would lengthen a text each time."""
_PATTERNS = (r" {2,}", r"\n", r"\s+", r"\s{2,}|[\n\r\t]", r"[\n\r\t]")
"""The regular expressions of transformers' own text encoders: others could run forever, or panic."""
_MAX_PARTS = 16
_MAX_GROWTH = 8
"""All replacements together may turn a character into this many."""
_MAX_FORM_BYTES = 128
"""Bytes of the longest normal form of a character; Unicode's longest has 33."""
_MAX_WORD_LENGTH = 1000
"""Characters of a word that WordPiece splits, in quadratic time."""


def check_saved_files(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint's model; a `CheckpointError` if it or the tokenizer's files could do more."""
    for name in ("adapter_config.json", "model.safetensors.index.json"):
        if (folder / name).exists():
            raise CheckpointError(
                f"{folder / name} names other models or files: a checkpoint's model is whole without it"
            )
    config = read_json(folder / "config.json", ("model_type", "vocab_size"))
    own = read_json(folder / "tokenizer_config.json", ())
    for name, value in (("config.json", config), ("tokenizer_config.json", own)):
        for key, inner in entries(value):
            if inner and (key in _REACHING or str(key).endswith("_file")):
                raise CheckpointError(f"{folder / name} has '{key}': {show(inner)}, which a checkpoint may not name")
    tokenizer = read_json(folder / "tokenizer.json", ("model",))
    with refusing(f"{folder}", CheckpointError):
        check_kind(config)
        check_tokenizer(tokenizer, config["vocab_size"])
    return config


def check_kind(config: Mapping[str, Any]) -> None:
    """Raise an `InputError` unless a model's config.json, nested ones included, describes a text encoder."""
    for key, kind in entries(config):
        if key == "model_type" and kind not in TEXT_ENCODERS:
            known = ", ".join(sorted(TEXT_ENCODERS))
            raise InputError(f"model_type {show(kind)} isn't a text encoder a checkpoint can hold (known: {known})")


def check_tokenizer(value: Mapping[str, Any], size: int) -> None:
    """Raise an `InputError` if a tokenizer.json has parts that no text encoder needs, or lets texts or tokens explode.

    `size` is the number of tokens that the model knows.
    """
    for name in ("padding", "truncation"):
        if value.get(name) is not None:
            raise InputError(f"tokenizer.json has a {name} of its own, {show(value[name])}")
    for place, known in _PARTS.items():
        parts = list(_flat(value.get(place)))
        kinds = Counter(part.get("type") if isinstance(part, dict) else show(part) for part in parts)
        strange = [kind for kind in kinds if not isinstance(kind, str) or kind not in known.split()]
        if strange:
            raise InputError(f"tokenizer.json has a {place} {show(strange[0])}, which no text encoder needs")
        repeated = [kind for kind, count in kinds.items() if count > 1 and kind not in _REPEATABLE]
        if repeated or len(parts) > _MAX_PARTS:
            raise InputError(f"tokenizer.json has {kinds[repeated[0]] if repeated else len(parts)} parts {place} alike")
        _check_growth(parts)
    model = value.get("model") or {}
    vocab, added = model.get("vocab"), value.get("added_tokens") or []
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab or ()))
    given = [*ids, *(token.get("id") for token in added)]
    if {*map(type, given)} - {int} or (given and not 0 <= min(given) <= max(given) < size):
        raise InputError(f"tokenizer.json has tokens beyond the {show(size)} that the model knows")
    if not all(isinstance(token.get("content"), str) and token["content"] for token in added):
        raise InputError("tokenizer.json adds a token without text")
    longest = model.get("max_input_chars_per_word", 0)
    if model.get("dropout") or not isinstance(longest, int) or longest > _MAX_WORD_LENGTH:
        raise InputError("tokenizer.json has a model with dropout, or that cuts words of any length")


def _check_growth(parts: list[Any]) -> None:
    growth = 1.0
    for part in parts:
        pattern, content = part.get("pattern"), part.get("content", part.get("prepend", ""))
        if isinstance(pattern, dict) and "Regex" in pattern and pattern["Regex"] not in _PATTERNS:
            raise InputError(f"tokenizer.json has the regular expression {show(pattern['Regex'])}")
        found = pattern.get("String", "") if isinstance(pattern, dict) else ""
        growth *= max(1.0, len(content) / max(1, len(found)))
        table = part.get("precompiled_charsmap")
        if table is not None and not _is_table(table):
            raise InputError("tokenizer.json has a damaged precompiled_charsmap")
    if growth > _MAX_GROWTH:
        raise InputError(f"tokenizer.json makes of one character {growth:,.0f}")


def _is_table(encoded: str) -> bool:
    """Whether a sentencepiece table has the length that its first four bytes say, and no normal form is too long."""
    table = base64.b64decode(encoded)
    size = int.from_bytes(table[:4], "little")
    return size <= len(table) - 4 and max(map(len, table[4 + size :].split(b"\0"))) <= _MAX_FORM_BYTES


def _flat(part: Any) -> Iterator[Any]:
    """The parts of, say, a tokenizer's normalizer, with nested sequences unpacked."""
    found = [] if part is None else [part]
    while found:
        part = found.pop()
        if isinstance(part, dict) and part.get("type") == "Sequence":
            found += [one for value in part.values() if isinstance(value, list) for one in value]
        else:
            yield part


def entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """All keys of a JSON value with their values, at any depth."""
    found = [value]
    while found:
        inside = found.pop()
        for key, inner in inside.items() if isinstance(inside, dict) else enumerate(inside):
            yield key, inner
            if isinstance(inner, (dict, list)):
                found.append(inner)
