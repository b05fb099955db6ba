"""What the two stages of training are made of: the loop that they share, and pure functions of arrays."""
