from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test's journal lies."""
    return tmp_path / "run.db"


@pytest.fixture
def no_blocking() -> Iterator[BlockBuster]:
    """Fail a test that blocks the event loop from within rc."""
    with blockbuster_ctx("rc") as blockbuster:
        yield blockbuster
