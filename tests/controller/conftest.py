from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio.lowlevel
import anyio.to_thread
import pytest
from trio.testing import MockClock

from tests.controller.world import World

T = TypeVar("T")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Both event loops; on trio, time is virtual and jumps to the next deadline as soon as everybody waits."""
    if request.param == "asyncio":
        return "asyncio"
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.fixture(autouse=True)
def inline_threads(anyio_backend: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run what would go to a thread in place on trio: virtual time would jump ahead while a thread works."""
    if anyio_backend == "asyncio":
        return

    async def run_sync(function: Callable[..., T], *args: Any, **options: Any) -> T:
        await anyio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)


@pytest.fixture
def world() -> World:
    return World()
