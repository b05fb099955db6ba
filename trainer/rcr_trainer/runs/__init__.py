"""A run folder (its files, its lock, what it was made from, whom it is trusted for), and a run's task and policy."""
