"""Engines that hold the pool, one per module: memory, faiss, pgvector, vectorstore."""
