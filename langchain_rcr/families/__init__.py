"""Encoder families, one a file: transformer, embeddings, lexical."""
