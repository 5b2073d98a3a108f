"""The log behind the controller: nobody waits for what is already durable."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from rc.commands import StartController
from rc.decision_log import DecisionLog
from rc.errors import JournalClosed
from rc.events.journal import Decision, Head, Record, chain_records, encode_decision, genesis_hash
from rc.events.types import Event
from rc.projections.control import ControlState
from rc.task_group import background_tasks


class SlowToAnswer:
    """A journal that is durable some time before it says so to the one who appended, as a busy event loop makes it."""

    journal_id = "slow"
    epoch = 1

    def __init__(self) -> None:
        self.head = Head(seq=0, hash=genesis_hash("slow"))
        self.durable = anyio.Event()
        self.answer = anyio.Event()

    async def append(self, decision: Decision) -> tuple[Record, ...]:
        records = chain_records(self.head, self.epoch, encode_decision(decision))
        await self.durable.wait()
        self.head = Head(seq=records[-1].seq, hash=records[-1].hash)
        await self.answer.wait()
        return records

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Answer in the end, so that a test that fails ends too."""
        try:
            yield
        finally:
            self.durable.set()
            self.answer.set()


def a_log(journal: SlowToAnswer, seen: list[Event]) -> DecisionLog:
    return DecisionLog(journal, ControlState(), seen.append)  # type: ignore[arg-type]  # it only appends


async def test_one_who_waits_sees_what_became_durable_before_its_submitter_does() -> None:
    journal, seen = SlowToAnswer(), list[Event]()
    log = a_log(journal, seen)

    async def until_seen() -> None:
        while not seen:
            await log.changed()

    async with anyio.create_task_group() as tasks, journal.answering():
        tasks.start_soon(log.submit, StartController(at=1.0, controller="c", epoch=1))
        await anyio.sleep(0.02)
        journal.durable.set()
        await anyio.sleep(0.02)
        with anyio.fail_after(5):
            await until_seen()
            assert log.settled.controller == "c"


async def test_one_who_begins_to_wait_is_told_of_what_this_very_look_found() -> None:
    """Its own condition may be what the look made true; nobody would wake it for that again."""
    journal, seen = SlowToAnswer(), list[Event]()
    log = a_log(journal, seen)
    async with anyio.create_task_group() as tasks, journal.answering():
        tasks.start_soon(log.submit, StartController(at=1.0, controller="c", epoch=1))
        journal.durable.set()
        await anyio.sleep(0.02)
        assert seen == []
        with anyio.fail_after(5):
            await log.changed()
        assert len(seen) == 1


async def test_a_closed_log_says_so_to_everybody_who_waits() -> None:
    log = a_log(SlowToAnswer(), [])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.changed)
        tasks.start_soon(log.lifecycle_changed)
        await anyio.sleep(0.02)
        log.close()
    with pytest.raises(JournalClosed, match="closed"):
        log.check_running()
    with pytest.raises(JournalClosed, match="closed"):
        await log.submit(StartController(at=1.0, controller="c", epoch=1))


async def test_background_tasks_end_with_their_body_even_those_that_have_hardly_begun() -> None:
    steps: list[str] = []

    async def task(name: str) -> None:
        steps.append(f"{name} begins")
        await anyio.sleep(0.02)
        steps.append(f"{name} goes on")

    with anyio.fail_after(5):
        async with background_tasks() as tasks:
            tasks.start_soon(task, "first")
            await anyio.sleep(0.001)
            tasks.start_soon(task, "second")
    assert "first begins" in steps
    assert not any("goes on" in step for step in steps)


async def test_background_tasks_outlive_a_cancellation_of_what_is_around_them_as_long_as_the_body_closes() -> None:
    steps: list[str] = []
    asked = anyio.Event()
    done = anyio.Event()

    async def helper() -> None:
        await asked.wait()
        await anyio.sleep(0.01)
        steps.append("helped")
        done.set()

    with anyio.move_on_after(0.01) as scope:
        async with background_tasks() as tasks:
            tasks.start_soon(helper)
            try:
                await anyio.sleep(1000)
            finally:
                with anyio.CancelScope(shield=True), anyio.fail_after(5):
                    asked.set()
                    await done.wait()
    assert scope.cancelled_caught
    assert steps == ["helped"]


async def test_an_error_of_a_background_task_is_not_lost() -> None:
    async def broken() -> None:
        raise ValueError("mine")

    async def body() -> None:
        async with background_tasks() as tasks:
            tasks.start_soon(broken)
            await anyio.sleep(1000)

    with pytest.raises(ExceptionGroup) as caught:
        await body()
    assert caught.group_contains(ValueError, match="mine")
