"""Checkpoints that a stranger wrote: each a change of a sound one, and words of the line that it is refused with."""

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rcr_trainer.data.examples import Example, write_examples
from safetensors.torch import load_file, save_file
from toys import reseal

from langchain_rcr import Item, TriEncoder

Change = Callable[[Path], Any]
EXAMPLES = [Example(f"e{n}", f"how many {word} are there", f"count({word})") for n, word in enumerate("abcdefgh")]


def checkpoint(folder: Path, family: str = "lexical", **options: Any) -> Path:
    """A sound one with its pool."""
    items = [Item(example.source, example.target) for example in EXAMPLES]
    model = TriEncoder.build(family, items, **options)
    if model.family.name == "structure":
        model.query.learn(items)  # type: ignore[operator]
    model.save_pretrained(folder)
    write_examples(folder / "pool.jsonl", EXAMPLES)
    reseal(folder)
    return folder


def resealed(file: Path) -> None:
    """Write anew the digests of the checkpoint that a file belongs to."""
    reseal(next(folder for folder in file.parents if (folder / "tri_encoder.json").exists()))


def changed(file: Path, **values: Any) -> None:
    """Change a JSON file, and the digests with it."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    resealed(file)


def keyed(name: str, **values: Any) -> Change:
    """A JSON file of the checkpoint has these values."""
    return lambda folder: changed(folder / name, **values)


def inner(name: str, **values: Any) -> Change:
    """A JSON file of the checkpoint has these values deep inside."""
    return keyed(name, inner=[values])


def written(name: str, text: str) -> Change:
    """A JSON file of the checkpoint begins with this text, in place of its brace."""

    def change(folder: Path) -> None:
        (folder / name).write_text(text + (folder / name).read_text().lstrip()[1:])
        resealed(folder / name)

    return change


def within(name: str, *keys: str, value: Any) -> Change:
    """A value deep inside a JSON file is this one."""

    def change(folder: Path) -> None:
        whole = place = json.loads((folder / name).read_text())
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        (folder / name).write_text(json.dumps(whole))
        resealed(folder / name)

    return change


def weights(name: str, **tensors: torch.Tensor | float) -> Change:
    """A safetensors file has these tensors; a number fills the one that is there. Its name has _ in place of a dot."""

    def change(folder: Path) -> None:
        file = folder / name
        found = load_file(file)
        names = {key.replace(".", "_"): key for key in found}
        for key, value in tensors.items():
            at = names.get(key, key)
            found[at] = value if isinstance(value, torch.Tensor) else torch.full_like(found[at], value)
        save_file(found, file, metadata={"format": "pt"})
        resealed(file)

    return change


def named(name: str) -> Change:
    """The manifest has a file of this name."""

    def change(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = {"size": 1, "sha256": "0" * 64}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return change


def all_of(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def replace(pattern: Mapping[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(kind: str, *parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(parts)}


def table(size: int, forms: bytes) -> dict[str, Any]:
    units = size.to_bytes(4, "little") + b"\1\0\0\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(units + forms).decode()}


HUGE, MANY = 10**9, 10**12
CONFIG, TOKENIZER, BACKBONE = "backbone/config.json", "backbone/tokenizer.json", "backbone.json"
QUERY = "query_encoder/model.safetensors"
BEACON = {"backbone": "someone/beacon", "use_timm_backbone": False, "backbone_config": None, "hidden_size": 16}
REPLACE = replace({"String": "a"}, "aaaa")
SPLIT = {"type": "Split", "pattern": {"Regex": "(?:a|aa)+$"}, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

OVER_A_MODEL: dict[str, tuple[Change, str]] = {
    # It names another repository, which transformers would fetch, with the user's token.
    **{
        kind: (
            keyed(CONFIG, model_type=kind, **BEACON),
            "'backbone': 'someone/beacon', which a checkpoint may not name",
        )
        for kind in ("mask2former", "maskformer", "detr", "dpt")
    },
    "timm": (keyed(CONFIG, model_type="timm_backbone"), "'timm_backbone' isn't a text encoder"),
    "pair": (keyed(CONFIG, model_type="encoder-decoder"), "'encoder-decoder' isn't a text encoder"),
    "nested": (inner(CONFIG, model_type="dpt"), "'dpt' isn't a text encoder"),
    "untyped": (keyed(CONFIG, model_type=["bert"]), "isn't a text encoder"),
    "tokenizer-class": (keyed("backbone/tokenizer_config.json", tokenizer_class="RagTokenizer"), "fine"),
    "twice": (written(CONFIG, '{"model_type": "dpt", '), "the key 'model_type' is there twice"),
    "no-number": (written(CONFIG, '{"x": NaN, '), "NaN is not a number in JSON"),
    # It would be as large as it says.
    "labels": (keyed(CONFIG, num_labels=HUGE), "num_labels = 1000000000 doesn't fit the weights beside it"),
    "layers": (keyed(CONFIG, num_hidden_layers=100_000), "more parts than the weights beside it"),
    "positions": (keyed(CONFIG, max_position_embeddings=MANY), "max_position_embeddings = 1000000000000 doesn't fit"),
    "width": (keyed(CONFIG, intermediate_size=1 << 20), "config.json describes a model of 67,"),
    "types": (keyed(CONFIG, type_vocab_size=1 << 19), "config.json describes a model of 8,"),
    "empty": (weights("backbone/model.safetensors", x=torch.zeros(0, MANY)), "fine"),
    "length": (keyed(BACKBONE, max_length=-MANY), "checkpoint-length"),
    "length-0": (keyed(BACKBONE, max_length=0), "checkpoint-length-0"),
    "length-word": (keyed(BACKBONE, max_length="x" * 9), "invalid literal for int"),
    # Its tokenizer would make a text grow, never end, or panic.
    "growing": (keyed(TOKENIZER, normalizer=sequence("normalizers", *[REPLACE] * 16)), "makes of one character 4,294"),
    "prepending": (keyed(TOKENIZER, normalizer={"type": "Prepend", "prepend": "x" * 10**6}), "of one character 1,000"),
    "bytes": (keyed(TOKENIZER, pre_tokenizer=sequence("pretokenizers", *[BYTES] * 40)), "40 parts pre_tokenizer alike"),
    "forms": (keyed(TOKENIZER, normalizer=table(4, b"x" * 10**6)), "damaged precompiled_charsmap"),
    "trie": (keyed(TOKENIZER, normalizer=table(1 << 31, b"x")), "damaged precompiled_charsmap"),
    "no-trie": (keyed(TOKENIZER, normalizer=table(0, b"x")), "index out of bounds"),
    "regex": (keyed(TOKENIZER, pre_tokenizer=SPLIT), "the regular expression '(?:a|aa)+$'"),
    "regex-deep": (
        keyed(TOKENIZER, normalizer=sequence("normalizers", sequence("normalizers", replace({"Regex": "(a*)*b"}, "")))),
        "the regular expression '(a*)*b'",
    ),
    "padding": (keyed(TOKENIZER, padding={"strategy": {"Fixed": MANY}}), "tokenizer.json has a padding of its own"),
    "truncation": (keyed(TOKENIZER, truncation={"max_length": MANY}), "tokenizer.json has a truncation of its own"),
    "dropout": (within(TOKENIZER, "model", "dropout", value=0.5), "a model with dropout"),
    "word": (within(TOKENIZER, "model", "max_input_chars_per_word", value=MANY), "that cuts words of any length"),
    "ids": (within(TOKENIZER, "model", "vocab", "what", value=4 * HUGE), "tokens beyond the 29 that the model knows"),
    "part": (keyed(TOKENIZER, normalizer={"type": "Evil"}), "a normalizer 'Evil', which no text encoder needs"),
    "no-part": (keyed(TOKENIZER, normalizer=[[]]), "which no text encoder needs"),
    "no-model": (keyed(TOKENIZER, model=[]), "checkpoint-no-model"),
    "template": (
        within(TOKENIZER, "post_processor", "special_tokens", "[SEP]", "ids", value=[10**6]),
        "index out of range",
    ),
    "no-text": (
        keyed(TOKENIZER, added_tokens=[{"id": 1, "content": "", "special": True}]),
        "adds a token without text",
    ),
}

LEXICAL: dict[str, tuple[Change, str]] = {
    "gap": (keyed("query_encoder/vocabulary.json", gap=HUGE), "with gaps of 1000000000: at most 16 each"),
    "longest": (keyed("candidate_encoder/vocabulary.json", longest=HUGE), "n-grams of up to 1000000000 words"),
    "longest-float": (keyed("candidate_encoder/vocabulary.json", longest="1" * 5000), "can't be used"),
    "idf": (written("query_encoder/vocabulary.json", '{"idf": {"a": 1e999}, "x": '), "can't be read as JSON"),
    "infinite": (
        within("query_encoder/vocabulary.json", "idf", "how", value=1e300),
        "is not an inverse document frequency",
    ),
    "dim": (keyed("query_encoder/encoder.json", dim=MANY), "numbers, which doesn't fit the weights beside it"),
    "dim-empty": (
        all_of(keyed("query_encoder/encoder.json", dim=MANY), weights(QUERY, x=torch.zeros(0, MANY))),
        "numbers, which doesn't fit the weights beside it",
    ),
    "dim-decoy": (
        all_of(keyed("query_encoder/encoder.json", dim=10**7), weights(QUERY, x=torch.zeros(10**7, dtype=torch.uint8))),
        "numbers, which doesn't fit the weights beside it",
    ),
    "not-finite": (weights(QUERY, ngrams_bag_weight=float("nan")), "weights that are not finite numbers"),
    "spec": (within("tri_encoder.json", "spec", "max_size", value=900), "max_size: must be from 1 to 8, got 900"),
    "spec-text": (within("tri_encoder.json", "spec", "max_size", value="9"), "checkpoint-spec-text"),
    "nul": (named("\0.json"), "names '\\x00.json', which is not a file of a checkpoint"),
    "long": (named(f"{'x' * 5000}.json"), "which is not a file of a checkpoint"),
    "half": (named("\ud800.json"), "names '\\ud800.json', which is not a file of a checkpoint"),
}

STRUCTURE: dict[str, tuple[Change, str]] = {
    "inventory-spec": (
        within("query_encoder/inventory.json", "spec", "max_size", value=900),
        "max_size: must be from 1 to 8, got 900",
    ),
    "inventory": (
        keyed(
            "query_encoder/inventory.json", columns=[[" -> ".join("a" * 100_000)], *([f"x{n}"] for n in range(10**5))]
        ),
        "a structure has more than 4 nodes",
    ),
    "inventory-twice": (keyed("query_encoder/inventory.json", columns=[["a"], ["a"]]), "stands in two columns"),
    "landmarks": (weights(QUERY, dual=torch.zeros(0, HUGE)), "dual doesn't fit the tensors beside it"),
    "columns": (weights(QUERY, landmarks_columns=2**31 - 1), "landmarks doesn't fit the tensors beside it"),
    "columns-below": (weights(QUERY, landmarks_columns=-5), "landmarks doesn't fit the tensors beside it"),
    "starts": (weights(QUERY, landmarks_starts=1), "landmarks doesn't fit the tensors beside it"),
    "vectors": (weights(QUERY, landmarks_vectors=torch.zeros(1, 16)), "landmarks.vectors doesn't fit the tensors"),
    "tokens": (weights(QUERY, landmarks_tokens=torch.zeros(1, 3)), "landmarks.tokens doesn't fit the tensors"),
    "described": (keyed("query_encoder/encoder.json", described=[[0, HUGE]]), "described doesn't fit the tensors"),
    "described-text": (keyed("query_encoder/encoder.json", described=[["a", {}]]), "was not written by this version"),
    "phrases": (weights(QUERY, phrases=HUGE), "doesn't fit the tensors beside it"),
    "phrases-below": (weights(QUERY, phrases=-HUGE), "doesn't fit the tensors beside it"),
    "speaks": (weights(QUERY, speaks=torch.zeros(3, 0)), "speaks doesn't fit the tensors beside it"),
    "anchors": (weights(QUERY, token_bags_anchors=torch.zeros(0, HUGE)), "doesn't fit the tensors beside it"),
    "flat": (weights(QUERY, token_bags_anchors=torch.zeros(4)), "doesn't fit the tensors beside it"),
    "scalar": (
        weights(QUERY, landmarks_starts=torch.zeros((), dtype=torch.int32)),
        "doesn't fit the tensors beside it",
    ),
}

TRANSFORMER: dict[str, tuple[Change, str]] = {
    "own-beacon": (
        keyed("query_encoder/config.json", model_type="dpt", **BEACON),
        "'backbone': 'someone/beacon', which a checkpoint may not name",
    ),
    "own-type": (keyed("query_encoder/config.json", model_type="detr"), "'detr' isn't a text encoder"),
    "own-chunks": (keyed("query_encoder/config.json", chunk_size_feed_forward=2), "checkpoint-own-chunks"),
    "own-length": (keyed("query_encoder/encoder.json", max_length=0), "checkpoint-own-length"),
    "own-regex": (keyed("context_encoder/tokenizer.json", pre_tokenizer=SPLIT), "the regular expression"),
}

HOSTILE = {
    "embeddings": OVER_A_MODEL,
    "lexical": LEXICAL,
    "structure": STRUCTURE,
    "transformer": TRANSFORMER,
}
