"""Databases whose queries run in separate processes, read-only and within limits."""
