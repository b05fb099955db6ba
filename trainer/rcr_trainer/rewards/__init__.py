"""Rewards for sets of picks: batched callables that give None where there is nothing to score."""
