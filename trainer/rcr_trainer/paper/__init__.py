"""The paper's tables and figures, each by one command: `rcr-train paper --table main`."""

from __future__ import annotations

from rcr_trainer.paper.splits import COVR, CSL, GEOQUERY, named_splits, split_settings
from rcr_trainer.paper.sweep import Sweep
from rcr_trainer.paper.tables import TABLES

__all__ = ["COVR", "CSL", "GEOQUERY", "TABLES", "Sweep", "named_splits", "split_settings"]
