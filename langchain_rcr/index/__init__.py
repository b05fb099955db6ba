"""Engines that hold the pool, one a file: memory."""
