"""Nothing is done, and nobody is told, before the journal has it: with a journal that takes its time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import pytest

from rc.controller import Controller
from rc.effects.fake import FakeEngine, Fault
from rc.effects.protocol import Failed, Outcome
from rc.errors import UpdateAbandoned
from rc.events.journal import Decision, Record
from rc.events.memory import MemoryJournal
from tests.controller.world import PROMPT, World, now, publish

T = TypeVar("T")

INTENT = {
    "pause": {"drain"},
    "set_label": {"begin_update"},
    "start_weight_update": {"begin_update"},
    "update_weights": {"begin_update"},
    "finish_weight_update": {"begin_update"},
    "reset_prefix_cache": {"installed"},
    "reset_multimodal_cache": {"installed"},
    "reset_encoder_cache": {"installed"},
    "resume": {"validated", "update_abandoned"},
    "generate": {"admit"},
}
"""What must be the last thing in the journal when a call is made, in a deployment with one rollout at a time."""


class SlowJournal:
    """Writes each decision some time after it was asked to."""

    def __init__(self, journal: MemoryJournal) -> None:
        self._journal = journal
        self._turn = anyio.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._journal, name)

    async def append(self, decision: Decision) -> tuple[Record, ...]:
        async with self._turn:
            await anyio.sleep(0.005)
            return await self._journal.append(decision)


class Suspicious(FakeEngine):
    """Looks at the journal at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.wrong: list[str] = []

    async def _call(self, call: str, effect: Callable[[], T]) -> Outcome[T]:
        last = self.world.kinds[-1] if self.world is not None and self.world.kinds else "nothing"
        if call in INTENT and last not in INTENT[call]:
            self.wrong.append(f"{call} after {last}")
        return await super()._call(call, effect)


@asynccontextmanager
async def slow(world: World) -> AsyncIterator[Controller]:
    async with (
        MemoryJournal.open(world.store, controller="c") as journal,
        Controller.open(
            SlowJournal(journal),  # type: ignore[arg-type]  # everything but append is the journal's own
            engine=world.engine,
            transfer=world.transfer,
            clock=now,
            new_id=world.new_id,
        ) as control,
    ):
        yield control


async def test_an_effect_starts_when_its_intent_is_on_record() -> None:
    engine = Suspicious()
    world = engine.world = World(engine)
    async with slow(world) as control:
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=1)
        await publish(control, 1)
        engine.script("pause", Fault(outcome=Failed("busy"), happens=True))
        with pytest.raises(UpdateAbandoned):
            await publish(control, 2)
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=1)
    assert engine.wrong == []
    assert {"pause", "start_weight_update", "reset_encoder_cache", "resume", "generate"} <= set(engine.calls)


async def test_nobody_is_told_before_it_is_on_record(world: World) -> None:
    async with slow(world) as control:
        assert world.kinds[-1] == "committed"
        async with control.rollout() as rollout:
            assert world.kinds[-1] == "admit"
            await rollout.generate(PROMPT, max_tokens=1)
            await rollout.finish()
            assert world.kinds[-1] == "finish_rollout"
        await publish(control, 1)
        assert world.kinds[-1] == "committed"
        assert control.digest == world.digest


async def test_what_others_see_is_what_is_on_record(world: World) -> None:
    async with slow(world) as control, anyio.create_task_group() as tasks:
        done = anyio.Event()

        async def compare() -> None:
            while not done.is_set():
                assert control.digest == world.digest
                await anyio.sleep(0.001)

        tasks.start_soon(compare)
        for number in range(1, 4):
            async with control.rollout() as rollout:
                await rollout.generate(PROMPT, max_tokens=1)
            await publish(control, number)
        done.set()


async def test_admissions_share_the_time_that_the_journal_takes(world: World) -> None:
    """Decisions are made on the newest state, so that a slow commit does not make a queue of them."""
    async with slow(world) as control:
        started = anyio.current_time()
        active = 0

        async def owner() -> None:
            nonlocal active
            async with control.rollout() as rollout:
                active += 1
                await rollout.generate(PROMPT, max_tokens=1)

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(owner)
            await anyio.sleep(0.001)
            assert len(control._log.state.rollouts.active) == 20
            assert len(control.state.rollouts.active) < 20
        assert active == 20
        assert anyio.current_time() > started
