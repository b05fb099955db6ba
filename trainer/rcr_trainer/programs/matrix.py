"""Programs as rows of a sparse binary matrix, so that coverage is a matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import scipy.sparse

from langchain_rcr.programs.spec import ProgramSpec


def structure_matrices(spec: ProgramSpec, *program_lists: Sequence[str]) -> list[scipy.sparse.csr_array]:
    """Return a matrix per list of programs: which of all lists' local structures each program has.

    Args:
        spec: how programs are read. A program that doesn't parse gets an empty row.
        program_lists: lists of programs; list i has N_i of them. Repeated programs are parsed once.

    Returns:
        Per list a binary float32 matrix (N_i, S), column indices sorted within rows. Column j of every matrix is the
        same structure: the S structures of all programs in all lists, sorted by name.
    """
    texts = dict.fromkeys(chain.from_iterable(program_lists))
    found = {text: spec.structures(text) for text in texts}
    column = {name: index for index, name in enumerate(sorted(frozenset().union(*found.values())))}
    rows = {
        text: np.sort(np.fromiter((column[name] for name in names), dtype=np.int32, count=len(names)))
        for text, names in found.items()
    }
    return [_matrix([rows[text] for text in programs], len(column)) for programs in program_lists]


def _matrix(rows: list[np.ndarray], width: int) -> scipy.sparse.csr_array:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    indices = np.concatenate([np.empty(0, dtype=np.int32), *rows])
    if offsets[-1] <= np.iinfo(np.int32).max:
        offsets = offsets.astype(np.int32)
    data = np.ones(len(indices), dtype=np.float32)
    matrix = scipy.sparse.csr_array((data, indices, offsets), shape=(len(rows), width))
    matrix.has_sorted_indices = True
    matrix.has_canonical_format = True
    return matrix
