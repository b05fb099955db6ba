"""A run folder (its files, lock, provenance and trust), and a run's task and policy."""
