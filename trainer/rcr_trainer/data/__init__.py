"""Data: users' files, GeoQuery, COVR-10, text2sql-data and Spider, each as a `Split` of `Example`s."""

from __future__ import annotations

from rcr_trainer.data.check import shared
from rcr_trainer.data.covr import covr_split
from rcr_trainer.data.examples import PARTS, Example, Split, write_examples, write_split
from rcr_trainer.data.files import ReadReport, read_examples, read_split, unparsed
from rcr_trainer.data.geoquery import download_geoquery, geoquery_split
from rcr_trainer.data.spider import spider_split
from rcr_trainer.data.text2sql import text2sql_split

__all__ = [
    "PARTS",
    "Example",
    "ReadReport",
    "Split",
    "covr_split",
    "download_geoquery",
    "geoquery_split",
    "read_examples",
    "read_split",
    "shared",
    "spider_split",
    "text2sql_split",
    "unparsed",
    "write_examples",
    "write_split",
]
