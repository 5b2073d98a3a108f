"""The command line: ``rc --help``."""

from rc.cli.main import main

__all__ = ("main",)
