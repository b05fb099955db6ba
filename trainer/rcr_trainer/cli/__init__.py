"""The command rcr-train: its commands, their help, and what they say."""

from rcr_trainer.cli.command import TABLES, build_parser, main

__all__ = ["TABLES", "build_parser", "main"]
