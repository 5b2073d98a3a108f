"""A task group that belongs to a context manager of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc

__all__ = ("background_tasks",)


@asynccontextmanager
async def background_tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Run tasks beside the body and cancel them when it ends; the body's exception comes out as itself.

    A plain task group would wrap a user's ``ValueError`` in an exception group, which no ``except ValueError`` catches.
    """
    error: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except BaseException as raised:  # re-raised below, outside of the group
            error = raised
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
