"""The command rcr-train: its subcommands, their help and their output."""

try:
    from rcr_trainer.cli.command import TABLES, build_parser, main
except KeyboardInterrupt:  # Ctrl-C right after the start
    raise SystemExit(130) from None

__all__ = ["TABLES", "build_parser", "main"]
