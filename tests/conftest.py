"""What all tests share."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# The suite without engines also runs where neither torch nor vLLM is installed.
collect_ignore = [] if find_spec("torch") else ["engine"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--rewrite``."""
    parser.addoption("--rewrite", action="store_true", help="write the golden scripts anew instead of comparing")
