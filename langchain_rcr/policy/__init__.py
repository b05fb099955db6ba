"""The tri-encoder, the loop that selects, how picks are explained and shown, and what a checkpoint folder is."""
