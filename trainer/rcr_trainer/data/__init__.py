"""Data: users' files, GeoQuery, COVR-10 and text2sql-data, each as a `Split` of `Example`s."""

from __future__ import annotations

from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import Example, Split, read_split, write_examples, write_split
from rcr_trainer.data.files import ReadReport, read_examples, unparsed
from rcr_trainer.data.geoquery import download_geoquery, geoquery_split
from rcr_trainer.data.overlap import Overlap, overlap, shared_pairs
from rcr_trainer.data.text2sql import text2sql_split

__all__ = [
    "Example",
    "Overlap",
    "ReadReport",
    "Split",
    "covr_split",
    "download_geoquery",
    "geoquery_split",
    "overlap",
    "read_examples",
    "read_split",
    "shared_pairs",
    "text2sql_split",
    "unparsed",
    "write_examples",
    "write_split",
]
