"""BERT as an ONNX graph that this package writes itself, from the arrays of a model.safetensors.

So a checkpoint has arrays and a few numbers, never a graph: the code that runs is always the code here.

In int8 the matrices take little more than a quarter of the memory, and reading a question two thirds of the time. Every
`BLOCK` numbers of a sum have a scale of their own, in a matrix as in what it is multiplied with (by ONNX Runtime).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from langchain_rcr.basics.section import show
from langchain_rcr.errors import InputError

Arrays = Mapping[str, NDArray[Any]]
BLOCK = 32
"""Numbers with the same scale in int8. With 16, no more picks were those of float32 (a trial on 450 questions)."""
_WORDS, _POSITIONS, _KINDS = (f"embeddings.{of}_embeddings.weight" for of in ("word", "position", "token_type"))
_EXPECTED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
_SCALE = ".scale"
"""Suffix of the array that goes with an int8 matrix (N, blocks, `BLOCK`): the scale of each block (N, blocks)."""
_MICROSOFT = "com.microsoft"
"""The domain of the operators that ONNX Runtime adds to ONNX's own."""
_OPSETS = {"": 20, _MICROSOFT: 1}
_IR_VERSION = 9
_FLOAT, _UINT8, _INT64 = 1, 2, 7
_TYPES = {np.dtype(np.float32): _FLOAT, np.dtype(np.uint8): _UINT8, np.dtype(np.int64): _INT64}


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a config.json that determine how a BERT computes, under the same names."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    layer_norm_eps: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Read from a config.json; an `InputError` if it describes another kind of model."""
        for name, expected in _EXPECTED.items():
            if config.get(name, expected) != expected:
                raise InputError(f"{name} is {show(config[name])}: without torch only BERT's models can be read")
        numbers: list[Any] = [{"layer_norm_eps": 1e-12, **config}.get(field.name) for field in fields(cls)]
        *sizes, epsilon = numbers
        if not all(type(size) is int and size > 0 for size in sizes) or not isinstance(epsilon, float):
            raise InputError("config.json lacks a size of the model")
        shape = cls(*numbers)
        if shape.hidden_size % shape.num_attention_heads:
            raise InputError(
                f"config.json: hidden_size {shape.hidden_size} is not a multiple of {shape.num_attention_heads} heads"
            )
        return shape

    def config(self) -> dict[str, Any]:
        """As a config.json, which `of` reads."""
        return _EXPECTED | asdict(self)

    @property
    def read_at(self) -> int:
        """The layer after which tokens are read; see `PooledTransformer.read`."""
        return 3 * self.num_hidden_layers // 4


def _parts(shape: Shape) -> Iterator[tuple[str, list[str], tuple[int, ...]]]:
    """Each matrix or norm (one axis) of the graph: its name, the `BertModel` parts that it is made of, and their shape.

    The graph's matrix is the parts concatenated by rows, then transposed.
    """
    d, inner = shape.hidden_size, shape.intermediate_size
    yield "start", ["embeddings.LayerNorm"], (d,)
    for n in range(shape.num_hidden_layers):
        at = f"encoder.layer.{n}"
        yield f"{n}.reads", [f"{at}.attention.self.{part}" for part in ("query", "key", "value")], (d, d)
        yield f"{n}.mixes", [f"{at}.attention.output.dense"], (d, d)
        yield f"{n}.mixed", [f"{at}.attention.output.LayerNorm"], (d,)
        yield f"{n}.widens", [f"{at}.intermediate.dense"], (inner, d)
        yield f"{n}.narrows", [f"{at}.output.dense"], (d, inner)
        yield f"{n}.done", [f"{at}.output.LayerNorm"], (d,)


def arranged(shape: Shape, tensors: Arrays) -> dict[str, NDArray[np.float32]]:
    """The graph's arrays, from those of Hugging Face's `BertModel`; an `InputError` if they don't fit."""
    d, found = shape.hidden_size, dict[str, NDArray[np.float32]]()

    def take(name: str, *size: int) -> NDArray[np.float32]:
        array = tensors.get(name, tensors.get(f"bert.{name}"))
        if array is None or array.shape[-len(size) :] != size:
            raise InputError(f"model.safetensors: {name} is not there, or has a shape that config.json doesn't give it")
        return np.asarray(array, dtype=np.float32)

    found["words"] = take(_WORDS, shape.vocab_size, d)
    found["positions"] = take(_POSITIONS, shape.max_position_embeddings, d) + take(_KINDS, d)[:1]
    for to, names, size in _parts(shape):
        weight = np.concatenate([take(f"{name}.weight", *size) for name in names])
        found[to if len(size) > 1 else f"{to}.weight"] = np.ascontiguousarray(weight.T)
        found[f"{to}.bias"] = np.concatenate([take(f"{name}.bias", size[0]) for name in names])
    return found


def spread(shape: Shape, arrays: Arrays) -> dict[str, NDArray[np.float32]]:
    """float32 arrays as `BertModel` has them: the inverse of `arranged`, but token types stay merged into positions."""
    kinds = np.zeros((2, shape.hidden_size), dtype=np.float32)
    found = {_WORDS: arrays["words"], _POSITIONS: arrays["positions"], _KINDS: kinds}
    for to, names, size in _parts(shape):
        weights = np.split(arrays[to if len(size) > 1 else f"{to}.weight"].T, len(names))
        for name, weight, bias in zip(names, weights, np.split(arrays[f"{to}.bias"], len(names)), strict=True):
            found[f"{name}.weight"], found[f"{name}.bias"] = weight, bias
    return found


def check(shape: Shape, arrays: Arrays) -> None:
    """Raise an `InputError` unless these are the arrays of a graph of this shape, in float32 or int8."""
    if shape.num_hidden_layers > len(arrays):
        raise InputError(f"config.json has {shape.num_hidden_layers} layers, model.safetensors {len(arrays)} arrays")
    sizes: dict[str, tuple[int, ...]] = {"positions": (shape.max_position_embeddings, shape.hidden_size)}
    matrices: dict[str, tuple[int, ...]] = {"words": (shape.vocab_size, shape.hidden_size)}
    for to, names, (side, *rows) in _parts(shape):
        columns = side * len(names)
        sizes[f"{to}.bias"] = (columns,)
        if rows:
            matrices[to] = rows[0], columns
        else:
            sizes[f"{to}.weight"] = (columns,)
    small = {name for name in matrices if name in arrays and arrays[name].dtype == np.int8}
    for name in small:
        lines, summed = matrices[name] if name == "words" else matrices[name][::-1]
        blocks = -(-summed // BLOCK)
        matrices[name], sizes[name + _SCALE] = (lines, blocks, BLOCK), (lines, blocks)
    sizes |= matrices
    if strange := sizes.keys() ^ arrays.keys():
        raise InputError(f"model.safetensors: {show(min(strange))} is missing, or should not be there")
    for name, size in sizes.items():
        kind = np.int8 if name in small else np.float32
        if arrays[name].shape != size or arrays[name].dtype != kind:
            raise InputError(f"model.safetensors: {name} has shape {arrays[name].shape}, not {size}, or another type")
        if kind is np.float32 and not np.isfinite(arrays[name]).all():
            raise InputError(f"model.safetensors: {name} has numbers that are not finite")


def graph(shape: Shape, arrays: Arrays) -> bytes:
    """The ONNX model: `words` (1, T, d) → `last` (1, T, d), the last layer's vectors, and `inner`, those of `read_at`.

    The lookup (`looked_up`) is left out, since the session would hold a second copy of the vocabulary.
    """
    made, d = _Graph(), shape.hidden_size

    def constant(name: str) -> str:
        return made.constant(name, arrays[name])

    def linear(x: str, name: str, inputs: int) -> str:
        if name + _SCALE not in arrays:
            product = made.node("MatMul", [x, constant(name)], f"{name}.product")
        else:
            shifted = made.constant(name, arrays[name].view(np.uint8) ^ 128)  # the operator subtracts 128
            product = made.node(
                "MatMulNBits",
                [x, shifted, constant(name + _SCALE)],
                f"{name}.product",
                domain=_MICROSOFT,
                **{"K": inputs, "N": len(arrays[name]), "bits": 8, "block_size": BLOCK, "accuracy_level": 4},
            )
        return made.node("Add", [product, constant(f"{name}.bias")], f"{name}.out")

    def normed(x: str, skip: str, name: str, to: str) -> str:
        inputs = [x, skip, constant(f"{name}.weight"), constant(f"{name}.bias")]
        return made.node("SkipLayerNormalization", inputs, to, domain=_MICROSOFT, epsilon=shape.layer_norm_eps)

    def state(n: int) -> str:
        return "last" if n == shape.num_hidden_layers else "inner" if n == shape.read_at else f"{n}.state"

    length = made.node("Shape", ["words"], "length", start=1, end=2)
    zero = made.constant("zero", np.zeros(1, dtype=np.int64))
    places = made.node("Slice", [constant("positions"), zero, length, zero], "places")
    x = normed("words", made.node("Unsqueeze", [places, zero], "places.one"), "start", state(0))
    for n in range(shape.num_hidden_layers):
        reads = linear(x, f"{n}.reads", d)
        parts = [f"{n}.query", f"{n}.key", f"{n}.value"]
        made.node("Split", [reads], *parts, axis=-1, num_outputs=3)
        mixed = made.node(
            "MultiHeadAttention", parts, f"{n}.heads", domain=_MICROSOFT, num_heads=shape.num_attention_heads
        )
        x = normed(linear(mixed, f"{n}.mixes", d), x, f"{n}.mixed", f"{n}.middle")
        wide = made.node("Gelu", [linear(x, f"{n}.widens", d)], f"{n}.wide")
        x = normed(linear(wide, f"{n}.narrows", shape.intermediate_size), x, f"{n}.done", state(n + 1))
    return made.model({"words": ("one", "tokens", "width")}, ["last", "inner"])


def looked_up(arrays: Arrays, ids: Sequence[int]) -> NDArray[np.float32]:
    """The model's input, (1, T, d): the vectors of T tokens."""
    words = arrays["words"][list(ids)]
    if "words" + _SCALE in arrays:
        blocks = words * arrays["words" + _SCALE][list(ids)][..., None]
        words = blocks.reshape(len(ids), -1)[:, : arrays["positions"].shape[1]]
    return np.asarray(words[None], dtype=np.float32)


def smaller(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """The arrays from `arranged` with matrices and word vectors in int8."""
    found = dict(arrays)
    for name, array in arrays.items():
        if array.ndim > 1 and name != "positions":
            lines = array if name == "words" else array.T
            room = -lines.shape[1] % BLOCK
            blocks = np.pad(lines, ((0, 0), (0, room))).reshape(len(lines), -1, BLOCK)
            found[name + _SCALE] = scale = np.maximum(np.abs(blocks).max(axis=2), 1e-12) / 127
            found[name] = np.rint(blocks / scale[..., None]).astype(np.int8)
    return found


class _Graph:
    """A graph under construction: each call adds a node or a constant and returns the name of its output.

    It writes protocol buffers, as the package `onnx` would. The numbers are those of the fields in onnx.proto
    (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
    """

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._constants: list[bytes | memoryview] = []  # not copied until the whole file is

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """A constant array: float32, uint8 or int64."""
        dims = b"".join(_number(1, size) for size in array.shape)
        about = dims + _number(2, _TYPES[array.dtype]) + _text(8, name) + _begun(9, array.nbytes)
        self._constants += [_begun(5, len(about) + array.nbytes) + about, np.ascontiguousarray(array).data.cast("B")]
        return name

    def node(
        self, kind: str, inputs: Sequence[str], output: str, *outputs: str, domain: str = "", **attributes: int | float
    ) -> str:
        """A node; returns its first output."""
        names = b"".join([*(_text(1, each) for each in inputs), *(_text(2, each) for each in (output, *outputs))])
        about = b"".join(_bytes(5, _attribute(name, value)) for name, value in attributes.items())
        self._nodes.append(_bytes(1, names + _text(4, kind) + about + _text(7, domain)))
        return output

    def model(self, inputs: Mapping[str, Sequence[str]], outputs: Sequence[str]) -> bytes:
        """The file, given the inputs by name, each with the names of its axes, and the outputs; all are float32."""
        shown = b"".join(_bytes(11, _about(name, axes)) for name, axes in inputs.items())
        given = b"".join(_bytes(12, _about(name, None)) for name in outputs)
        graph: list[bytes | memoryview] = [*self._nodes, _text(2, "encoder"), *self._constants, shown, given]
        opsets = b"".join(_bytes(8, _text(1, domain) + _number(2, version)) for domain, version in _OPSETS.items())
        return b"".join([_number(1, _IR_VERSION), _begun(7, sum(map(len, graph))), *graph, opsets])


def _about(name: str, axes: Sequence[str] | None) -> bytes:
    shape = b"" if axes is None else _bytes(2, b"".join(_bytes(1, _text(2, axis)) for axis in axes))
    return _text(1, name) + _bytes(2, _bytes(1, _number(1, _FLOAT) + shape))


def _attribute(name: str, value: int | float) -> bytes:
    if isinstance(value, float):
        return _text(1, name) + b"\x15" + struct.pack("<f", value) + _number(20, 1)
    return _text(1, name) + _number(3, value) + _number(20, 2)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative number as its two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _begun(field: int, length: int) -> bytes:
    """The header before `length` bytes."""
    return _varint(field << 3 | 2) + _varint(length)


def _bytes(field: int, value: bytes) -> bytes:
    return _begun(field, len(value)) + value


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())
