"""Databases whose queries run in a process of their own, read-only and within limits."""
