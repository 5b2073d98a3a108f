"""What every journal promises, whatever it is stored in: `rc.events.journal.Journal`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio
import pytest
from anyio.abc import TaskStatus

from rc.commands import AdmitRollout
from rc.errors import JournalClosed, JournalFenced, JournalLocked, JournalUnusable
from rc.events.codec import UnreadableEvent
from rc.events.journal import Decision, Journal, JournalReader, Record, genesis_hash
from rc.events.memory import MemoryJournal, MemoryReader, MemoryStore
from rc.events.sqlite import SqliteJournal
from rc.events.sqlite_reader import SqliteReader
from rc.events.types import Admit
from rc.events.verify import verify
from tests.journal.decisions import DIGEST, Tail, abort_all, admit, finish, read, rollouts


class Backend(Protocol):
    """One place to store a journal in."""

    def open(self, controller: str = "c1", *, takeover: bool = False) -> AbstractAsyncContextManager[Journal]: ...

    def reader(self) -> AbstractAsyncContextManager[JournalReader]: ...

    async def fill_up(self, journal: Journal) -> None:
        """Leave no room for a further record."""


class SqliteBackend:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "run.db"

    def open(self, controller: str = "c1", *, takeover: bool = False) -> AbstractAsyncContextManager[Journal]:
        return SqliteJournal.open(self.path, controller=controller, takeover=takeover)

    def reader(self) -> AbstractAsyncContextManager[JournalReader]:
        return SqliteReader.open(self.path)

    async def fill_up(self, journal: Journal) -> None:
        assert isinstance(journal, SqliteJournal)
        await journal._writing.call(lambda connection: connection.execute("PRAGMA max_page_count = 1").fetchall())


class MemoryBackend:
    def __init__(self) -> None:
        self.store = MemoryStore()

    def open(self, controller: str = "c1", *, takeover: bool = False) -> AbstractAsyncContextManager[Journal]:
        return MemoryJournal.open(self.store, controller=controller, takeover=takeover)

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[JournalReader]:
        yield MemoryReader(self.store)

    async def fill_up(self, journal: Journal) -> None:
        self.store.capacity = len(self.store.records)


@pytest.fixture(params=["sqlite", "memory", "memory on trio"])
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def anyio_backend(case: str) -> str:
    return "trio" if case.endswith("trio") else "asyncio"


@pytest.fixture
def backend(case: str, tmp_path: Path) -> Backend:
    return SqliteBackend(tmp_path) if case == "sqlite" else MemoryBackend()


# ---------------------------------------------------------------------------------------------------------- appending


async def test_an_append_returns_the_records_that_readers_get(backend: Backend) -> None:
    async with backend.open() as journal:
        appended = [
            *await journal.append(admit()),
            *await journal.append(abort_all(1, 2)),
            *await journal.append(finish()),
        ]
        assert await read(journal) == appended
        async with backend.reader() as reader:
            assert await read(reader) == appended
            assert reader.journal_id == journal.journal_id


async def test_a_record_says_what_was_decided_and_why(backend: Backend) -> None:
    decision = abort_all(1, 2, 3)
    async with backend.open() as journal:
        await journal.append(admit())
        records = await journal.append(decision)
    assert [record.seq for record in records] == [2, 3, 4]
    assert [record.event for record in records] == list(decision.events)
    assert [record.cause for record in records] == [2, 2, 2]
    assert [record.events for record in records] == [3, 0, 0]
    assert [record.state_digest for record in records] == [None, None, DIGEST]
    assert [record.decoded_command() for record in records] == [decision.command, None, None]
    assert {record.epoch for record in records} == {1}
    assert {record.at for record in records} == {2000.25}


async def test_the_head_moves_with_each_durable_record_and_survives_reopening(backend: Backend) -> None:
    async with backend.open() as journal:
        assert (journal.head.seq, journal.head.hash) == (0, genesis_hash(journal.journal_id))
        for decision in (admit(), abort_all(1, 2)):
            records = await journal.append(decision)
            assert (journal.head.seq, journal.head.hash) == (records[-1].seq, records[-1].hash)
        head = journal.head
    async with backend.open() as again:
        assert again.head == head
        (record,) = await again.append(admit(5))
        assert (record.seq, record.epoch) == (4, 2)


async def test_concurrent_appends_keep_the_order_of_their_calls(backend: Backend) -> None:
    begun: list[str] = []

    async def append(journal: Journal, number: int) -> None:
        begun.append(f"r{number}")
        (record,) = await journal.append(admit(number))
        assert rollouts([record]) == [f"r{number}"]

    async with backend.open() as journal:
        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(append, journal, number)
        assert rollouts(await read(journal)) == begun


async def test_the_append_of_a_cancelled_caller_is_there_and_whole(backend: Backend) -> None:
    async with backend.open() as journal:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await journal.append(abort_all(1, 2, 3))
        assert scope.cancelled_caught
        await journal.append(admit(9))
        assert rollouts(await read(journal)) == ["r1", "r2", "r3", "r9"]


async def test_what_was_queued_when_the_block_is_left_is_written(backend: Backend) -> None:
    async with backend.open() as journal:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await journal.append(admit(7))
    async with backend.reader() as reader:
        assert rollouts(await read(reader)) == ["r7"]


async def test_leaving_by_cancellation_keeps_what_was_appended(backend: Backend) -> None:
    with anyio.CancelScope() as scope:
        async with backend.open() as journal:
            await journal.append(admit(1))
            scope.cancel()
            await journal.append(admit(2))
    async with backend.open() as journal:
        assert rollouts(await read(journal)) == ["r1", "r2"]


async def test_an_error_of_the_body_comes_out_as_itself(backend: Backend) -> None:
    async def fail() -> None:
        async with backend.open() as journal:
            await journal.append(admit())
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail()
    async with backend.reader() as reader:
        assert len(await read(reader)) == 1


async def test_an_event_that_could_not_be_read_back_is_refused_alone(backend: Backend) -> None:
    event = Admit(at=1.0, rollout="r", engine="e", version=1, lease_s=math.inf)
    poisoned = Decision(command=AdmitRollout(at=1.0, rollout="r", lease_s=1.0), events=(event,), digests=(None,))
    async with backend.open() as journal:
        with pytest.raises(UnreadableEvent, match="admit event"):
            await journal.append(poisoned)
        await journal.append(admit())
        assert len(await read(journal)) == 1


async def test_a_time_given_as_a_whole_number_verifies_like_any_other(backend: Backend) -> None:
    event = Admit(at=5, rollout="r", engine="e", version=1, lease_s=1)
    decision = Decision(command=AdmitRollout(at=5, rollout="r", lease_s=1), events=(event,), digests=(None,))
    async with backend.open() as journal:
        await journal.append(decision)
        assert [record.at for record in await read(journal)] == [5.0]


# ------------------------------------------------------------------------------------------------------------ failing


async def test_a_medium_that_is_full_stops_the_opening_and_loses_nothing(backend: Backend) -> None:
    async with backend.open() as journal:
        await journal.append(admit(1))
        await backend.fill_up(journal)
        with pytest.raises(JournalUnusable, match=r"record 2.* full"):
            await journal.append(finish(1, tokens=5000))
        head = journal.head
        with pytest.raises(JournalClosed, match="stopped by an earlier error"):
            await journal.append(admit(2))
        assert journal.head == head
        assert rollouts(await read(journal)) == ["r1"]


async def test_appends_behind_one_that_failed_hear_that_nothing_was_written(backend: Backend) -> None:
    heard: list[type[Exception]] = []

    async def append(journal: Journal, decision: Decision) -> None:
        try:
            await journal.append(decision)
        except (JournalUnusable, JournalClosed) as error:
            heard.append(type(error))

    async with backend.open() as journal:
        await backend.fill_up(journal)
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(append, journal, abort_all(*range(number * 1000, number * 1000 + 600)))
    assert sorted(heard, key=str) == [JournalClosed, JournalClosed, JournalUnusable]


async def test_a_closed_journal_says_so(backend: Backend) -> None:
    async with backend.open() as journal:
        pass
    with pytest.raises(JournalClosed, match="open it again"):
        await journal.append(admit())


# ------------------------------------------------------------------------------------------------- one writer at a time


async def test_a_second_writer_is_refused_while_the_first_lives(backend: Backend) -> None:
    async with backend.open("first") as journal:
        with pytest.raises(JournalLocked, match=r"held by controller first.*takeover=True"):
            async with backend.open("second"):
                pass
        await journal.append(admit())


async def test_every_opening_has_a_larger_epoch(backend: Backend) -> None:
    epochs = []
    for _ in range(3):
        async with backend.open() as journal:
            epochs.append(journal.epoch)
    assert epochs == [1, 2, 3]


async def test_after_a_takeover_the_old_writer_is_fenced_and_writes_nothing(backend: Backend) -> None:
    async with backend.open("old") as old:
        await old.append(admit(1))
        async with backend.open("new", takeover=True) as new:
            await new.append(admit(2))
            with pytest.raises(JournalFenced, match="taken over by controller new"):
                await old.append(admit(3))
            with pytest.raises(JournalClosed):
                await old.append(admit(4))
            await new.append(admit(5))
            assert rollouts(await read(new)) == ["r1", "r2", "r5"]
            assert [record.epoch for record in await read(new)] == [1, 2, 2]


async def test_a_fenced_writer_that_closes_does_not_unlock_the_new_one(backend: Backend) -> None:
    async def hold(*, task_status: TaskStatus[anyio.Event]) -> None:
        done = anyio.Event()
        async with backend.open("new", takeover=True):
            task_status.started(done)
            await done.wait()

    async with anyio.create_task_group() as tasks:
        async with backend.open("old"):
            done = await tasks.start(hold)
        with pytest.raises(JournalLocked, match="controller new"):
            async with backend.open("third"):
                pass
        done.set()
    async with backend.open("third") as third:
        assert third.epoch == 3


async def test_taking_over_what_nobody_holds_is_an_ordinary_opening(backend: Backend) -> None:
    async with backend.open("only", takeover=True) as journal:
        await journal.append(admit())
        assert journal.epoch == 1


# ------------------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize("after", range(8))
async def test_reading_behind_a_record_gives_the_rest(backend: Backend, after: int) -> None:
    async with backend.open() as journal:
        for decision in (admit(1), abort_all(2, 3, 4), admit(5), finish(1)):
            await journal.append(decision)
        assert [record.seq for record in await read(journal, after=after)] == list(range(after + 1, 7))


@pytest.mark.parametrize("own", [True, False], ids=["the writer's own", "a reader's"])
async def test_following_gives_old_and_new_records_in_order(backend: Backend, own: bool) -> None:
    sizes = [number % 4 + 1 for number in range(50)]
    async with backend.open() as journal, backend.reader() as reader, anyio.create_task_group() as tasks:
        await journal.append(admit(1))
        await journal.append(admit(2))
        tail = Tail(journal if own else reader, after=1, wanted=1 + sum(sizes))
        tasks.start_soon(tail.run)
        for size in sizes:
            await journal.append(abort_all(*range(size)))
            await anyio.sleep(0.002)
        with anyio.fail_after(5):
            await tail.enough.wait()
        tasks.cancel_scope.cancel()
    assert tail.seen == (await stored(backend))[1:]


async def stored(backend: Backend) -> list[Record]:
    async with backend.reader() as reader:
        return await read(reader)


async def test_following_waits_for_a_record_that_is_not_there_yet(backend: Backend) -> None:
    async with backend.open() as journal, backend.reader() as reader, anyio.create_task_group() as tasks:
        tail = Tail(reader, after=2, wanted=1)
        tasks.start_soon(tail.run)
        for number in (1, 2, 3):
            await journal.append(admit(number))
            await anyio.sleep(0.01)
        with anyio.fail_after(5):
            await tail.enough.wait()
        tasks.cancel_scope.cancel()
    assert [record.seq for record in tail.seen] == [3]


async def test_an_audit_of_a_whole_journal_finds_nothing(backend: Backend) -> None:
    async with backend.open() as journal:
        await journal.append(abort_all(1, 2))
        await journal.append(admit(3))
    async with backend.open() as journal:
        await journal.append(abort_all(4, 5))
        await journal.append(admit(6))
        head = journal.head
    async with backend.reader() as reader:
        report = await verify(reader)
    assert report.intact
    assert (report.records, report.decisions, report.head) == (6, 4, head)
    assert [(span.epoch, span.first, span.last) for span in report.epochs] == [(1, 1, 3), (2, 4, 6)]


async def test_an_empty_journal_verifies(backend: Backend) -> None:
    async with backend.open() as journal:
        assert await read(journal) == []
        report = await verify(journal)
    assert (report.intact, report.records, report.epochs) == (True, 0, ())
