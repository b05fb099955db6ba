"""Engines that hold the pool, one a module: memory, faiss, pgvector, vectorstore."""
