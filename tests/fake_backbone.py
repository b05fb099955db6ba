"""A frozen text encoder for tests that need no real one."""

import numpy as np


class FakeBackbone:
    """Hashed words as unit vectors, and as tokens."""

    dim, symmetric = 16, True

    def read(self, texts):
        return self.embed(texts), [np.stack([self._word(word) for word in text.split()]) for text in texts]

    def embed(self, texts, *, queries=False):
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        rows = np.stack([sum(self._word(word) for word in text.split() or ["_"]) for text in texts])
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    def _word(self, word):
        return np.random.default_rng(list(word.encode())).normal(size=self.dim).astype(np.float32)

    def describe(self, folder):
        return {"kind": "langchain", "class": "Fake"}
