"""Families of encoders, found by name: ours and those of other distributions."""

from __future__ import annotations

from langchain_rcr.families.base import DEFAULT_FAMILY, Family, ModelSettings, families, family_names, get_family

__all__ = ["DEFAULT_FAMILY", "Family", "ModelSettings", "families", "family_names", "get_family"]
