"""The tri-encoder, the selection loop, how picks are explained and shown, and the checkpoint folder."""
