"""The paper's tables and figures (`rcr-train paper`), and its learning rivals, found by name in `BASELINES`."""
