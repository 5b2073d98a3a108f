from __future__ import annotations

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """The only loop that aiohttp runs on."""
    return "asyncio"
