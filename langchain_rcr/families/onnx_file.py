"""Writes ONNX models for ONNX Runtime without the package `onnx`: protocol buffers with a handful of messages.

The numbers are those of the fields in onnx.proto (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MICROSOFT = "com.microsoft"
"""The domain of the operators that ONNX Runtime adds to ONNX's own."""
_OPSETS = {"": 20, MICROSOFT: 1}
_IR_VERSION = 9
_FLOAT, _UINT8, _INT64 = 1, 2, 7
_TYPES = {np.dtype(np.float32): _FLOAT, np.dtype(np.uint8): _UINT8, np.dtype(np.int64): _INT64}


class Graph:
    """A graph under construction: each call adds a node or a constant and returns the name of its output."""

    def __init__(self) -> None:
        self._nodes: list[bytes] = []
        self._constants: dict[str, tuple[bytes, memoryview]] = {}  # not copied until the whole file is

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """A constant array: float32, uint8 or int64."""
        if name not in self._constants:
            dims = b"".join(_number(1, size) for size in array.shape)
            about = dims + _number(2, _TYPES[array.dtype]) + _text(8, name) + _begun(9, array.nbytes)
            raw = np.ascontiguousarray(array).data.cast("B")
            self._constants[name] = _begun(5, len(about) + array.nbytes) + about, raw
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
        constants = [part for parts in self._constants.values() for part in parts]
        graph: list[bytes | memoryview] = [*self._nodes, _text(2, "encoder"), *constants, shown, given]
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
