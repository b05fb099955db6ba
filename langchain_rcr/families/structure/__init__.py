"""The structure family."""
