"""A deployment in memory: one journal that outlives its controllers, one engine, one transfer."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from rc.controller import Controller
from rc.effects.fake import FakeEngine, FakeTransfer, FakeWeights
from rc.events.journal import Record
from rc.events.memory import MemoryJournal, MemoryStore
from rc.events.types import Event
from rc.lifecycle import Phase
from rc.projections.control import ControlState, evolve, state_digest
from rc.update_watch import Commit
from rc.versions import WeightIdentity

PROMPT = tuple(range(1, 20))
"""Longer than one block of the fake engine's prefix cache."""


def now() -> float:
    """The event loop's own time as a Unix time, so that virtual time is the controller's time."""
    return 1_000_000_000.0 + anyio.current_time()


def step(number: int) -> WeightIdentity:
    return WeightIdentity(run="r", step=number)


def weights(number: int) -> FakeWeights:
    return FakeWeights(content=f"w{number}")


async def publish(control: Controller, number: int) -> Commit:
    return await control.update(step(number), weights(number))


async def until(condition: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Wait for a condition; fail the test if it does not come true."""
    with anyio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - what a test waits for has no event of its own
            await anyio.sleep(0.001)


async def busy_life(control: Controller) -> None:
    """Rollouts and updates for ever, as a trainer has them."""

    async def owner() -> None:
        while True:
            async with control.rollout() as rollout:
                await rollout.generate(PROMPT, max_tokens=3)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(owner)
        while True:
            published = control.published
            await publish(control, published.identity.step + 1 if published else 0)
            await anyio.sleep(0.01)


class World:
    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.store = MemoryStore()
        self.engine = engine or FakeEngine()
        self.transfer = FakeTransfer()
        self._ids = itertools.count()

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Controller]:
        """Open a controller on the journal; every one in turn opens the same one."""
        settings: dict[str, Any] = {
            "engine": self.engine,
            "transfer": self.transfer,
            "clock": now,
            "new_id": self.new_id,
        }
        async with (
            MemoryJournal.open(self.store, controller="test") as journal,
            Controller.open(journal, **{**settings, **options}) as control,
        ):
            yield control

    def new_id(self, prefix: str) -> str:
        return f"{prefix}-{next(self._ids)}"

    @property
    def records(self) -> list[Record]:
        return self.store.records

    @property
    def kinds(self) -> list[str]:
        return [record.kind for record in self.store.records]

    def events(self, kind: str) -> list[Any]:
        return [record.event for record in self.store.records if record.kind == kind]

    def folded(self) -> ControlState:
        return fold(record.event for record in self.store.records)

    @property
    def digest(self) -> str:
        """Digest of the state that the journal alone gives."""
        return state_digest(self.folded())

    def phase(self) -> Phase:
        return self.folded().engine(self.engine.name).phase


def fold(events: Any) -> ControlState:
    state = ControlState()
    event: Event
    for event in events:
        state = evolve(state, event)
    return state
