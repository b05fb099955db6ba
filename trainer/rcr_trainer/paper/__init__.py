"""The paper's tables and figures (`rcr-train paper --table main`), and the learning rivals in them.

Only the command imports this package; the rivals are found by name in `rcr_trainer.baselines.BASELINES`.
"""
