"""The paper's tables and figures (`rcr-train paper --table main`), and the rivals in them that learn.

Nothing imports this room but the command; the rivals are found by their names in `rcr_trainer.baselines.BASELINES`.
"""
