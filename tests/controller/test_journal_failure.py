"""The journal fails under a controller: it stops, all who wait are told, and the next opening goes on from there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from rc.controller import Controller
from rc.errors import JournalClosed, JournalError, JournalFenced, JournalUnusable
from rc.events.journal import Decision, Record
from rc.events.memory import MemoryJournal
from rc.lifecycle import Phase
from rc.replay import replay
from tests.controller.world import PROMPT, World, now, publish, until


class FailingJournal:
    """A journal that breaks at one append, having written it or not."""

    def __init__(self, journal: MemoryJournal, at: int, error: Exception, *, written: bool) -> None:
        self._journal = journal
        self._at = at
        self._error = error
        self._written = written
        self._failed = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._journal, name)

    async def append(self, decision: Decision) -> tuple[Record, ...]:
        if self._failed:
            raise JournalClosed("stopped by an earlier error")
        self._at -= 1
        if self._at > 0:
            return await self._journal.append(decision)
        self._failed = True
        if self._written:
            await self._journal.append(decision)
        else:
            await anyio.lowlevel.checkpoint()
        raise self._error


@asynccontextmanager
async def failing(world: World, at: int, error: Exception, *, written: bool = False) -> AsyncIterator[Controller]:
    async with MemoryJournal.open(world.store, controller="c") as journal:
        broken = FailingJournal(journal, at, error, written=written)
        async with Controller.open(
            broken,  # type: ignore[arg-type]  # everything but append is the journal's own
            engine=world.engine,
            transfer=world.transfer,
            clock=now,
            new_id=world.new_id,
        ) as control:
            yield control


@pytest.mark.parametrize("written", [False, True], ids=["lost", "written"])
@pytest.mark.parametrize("at", range(1, 26))
async def test_an_append_that_fails_stops_everything_and_the_next_opening_goes_on(
    world: World, at: int, written: bool
) -> None:
    """Nothing is done on the strength of what may not be on disk, and an engine in the middle of it stays paused."""
    started = now()

    async def body() -> None:
        async with failing(world, at, JournalUnusable("disk full"), written=written) as control:
            world.engine.control_s = 0.001
            with anyio.fail_after(30):
                await busy_life_until_it_stops(control)
            calls = len(world.engine.calls)
            with pytest.raises(JournalClosed):
                await publish(control, 50)
            with pytest.raises(JournalClosed):
                async with control.rollout():
                    pass
            await anyio.sleep(0.02)
            assert world.engine.calls[calls:] in ([], ["observe"])  # the look of a handler that was already acting

    with pytest.raises(JournalError):
        await body()
    assert now() - started < 60
    label, content = world.engine.label, world.engine.content
    if content == "in flux" or (label == "default" and content != "as loaded"):
        assert world.engine.paused
    world.engine.control_s = 0.0
    async with world.open() as control:
        tainted = control.state.engine("fake").phase is Phase.TAINTED
        if tainted:
            world.engine.restart()
            await control.join()
        await publish(control, 60)
        assert not control.state.rollouts.active
        assert control.digest == world.digest
    assert replay(world.records).problems == ()
    assert world.engine.content == "w60"


async def busy_life_until_it_stops(control: Controller) -> None:
    stopped = 0

    async def owner() -> None:
        nonlocal stopped
        try:
            while True:
                async with control.rollout() as rollout:
                    await rollout.generate(PROMPT, max_tokens=1)
        except JournalError:
            stopped += 1

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(owner)
        try:
            for number in range(1, 40):
                await publish(control, number)
        except JournalError:
            stopped += 1
    assert stopped == 3


async def test_a_failure_that_only_the_background_met_comes_out_at_the_end(world: World) -> None:
    async def body() -> None:
        async with failing(world, 12, JournalUnusable("disk full")) as control:
            world.engine.control_s = 0.005
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(publish, control, 1)
                    await until(lambda: control.state.engine("fake").phase is Phase.QUIESCED)
                    scope.cancel()
            await anyio.sleep(0.1)

    with pytest.raises(JournalClosed, match="disk full"):
        await body()


async def test_an_owners_error_is_not_hidden_by_the_journals(world: World) -> None:
    async def body() -> None:
        async with failing(world, 11, JournalUnusable("disk full")) as control, control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=1)
            with pytest.raises(JournalUnusable):
                await rollout.finish()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await body()


async def test_an_owners_error_is_not_hidden_where_its_abort_cannot_be_recorded(world: World) -> None:
    async def body() -> None:
        async with failing(world, 11, JournalUnusable("disk full")) as control, control.rollout():
            with pytest.raises(JournalUnusable):
                async with control.rollout():
                    pass
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await body()
    assert world.kinds[-1] == "admit"


async def test_an_unforeseen_error_of_the_journal_stops_the_controller_too(world: World) -> None:
    async def body() -> None:
        async with failing(world, 10, RuntimeError("not a journal error")) as control:
            with pytest.raises(RuntimeError):
                async with control.rollout() as rollout:
                    await rollout.generate(PROMPT, max_tokens=1)
            with pytest.raises(JournalClosed):
                await publish(control, 1)

    with pytest.raises(JournalClosed, match="not a journal error"):
        await body()


async def test_a_controller_that_was_fenced_out_stops(world: World) -> None:
    async def body() -> None:
        async with world.open() as first, MemoryJournal.open(world.store, controller="second", takeover=True):
            with pytest.raises(JournalFenced):
                async with first.rollout():
                    pass
            with pytest.raises(JournalClosed):
                await publish(first, 1)

    with pytest.raises(JournalClosed, match="taken over"):
        await body()
    assert not world.engine.paused
