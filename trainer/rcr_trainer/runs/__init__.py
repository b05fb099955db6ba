"""A run folder: its files, its lock, what it was made from, and whom it is trusted for."""
