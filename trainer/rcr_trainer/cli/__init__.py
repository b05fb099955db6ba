"""The command rcr-train: its subcommands, their help and their output."""

from rcr_trainer.cli.command import TABLES, build_parser, main

__all__ = ["TABLES", "build_parser", "main"]
