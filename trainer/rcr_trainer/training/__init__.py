"""The parts of the two training stages: their shared loop, and pure functions of arrays."""
