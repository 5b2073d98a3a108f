"""What the write-ahead log, the group commit and the checkpoints do when something goes wrong."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from rc.errors import JournalClosed, JournalFenced, JournalUnusable
from rc.events import sqlite as journal_module
from rc.events.journal import Journal
from rc.events.sqlite import SqliteJournal
from rc.events.sqlite_reader import SqliteReader
from rc.events.verify import verify
from tests.journal.decisions import abort_all, admit, finish, read, rollouts
from tests.journal.test_sqlite_processes import child, last_whole_number

# -------------------------------------------------------------------------------------------------- the write-ahead log

Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files that a killed writer left, with some hundred records in the log."""
    path = tmp_path_factory.mktemp("killed") / "run.db"
    with child("append_for_ever", path) as writer:
        seq = 0
        while seq < 150:
            seq = last_whole_number([writer.line()])
        writer.signal(signal.SIGKILL)
    return {file.name: file.read_bytes() for file in path.parent.iterdir() if not file.name.endswith("-shm")}


@pytest.fixture
def restore(path: Path, killed: dict[str, bytes]) -> Callable[[Change], Path]:
    """Put the files there, the log changed."""

    def write(change: Change) -> Path:
        for name, content in killed.items():
            path.with_name(name).write_bytes(change(content) if name.endswith("-wal") else content)
        path.with_name("run.db-shm").unlink(missing_ok=True)
        return path

    return write


def cut(eighths: int) -> Change:
    return lambda log: log[: len(log) * eighths // 8]


def flip(eighths: int) -> Change:
    def change(log: bytes) -> bytes:
        place = len(log) * eighths // 8
        return log[:place] + bytes([log[place] ^ 0x10]) + log[place + 1 :]

    return change


TORN_LOGS: dict[str, Change] = {
    "cut within its header": lambda log: log[:20],
    "cut after its header": lambda log: log[:32],
    "zeros at its end": lambda log: log + bytes(10_000),
    **{f"cut at {eighths}/8": cut(eighths) for eighths in range(8)},
    **{f"a bit flipped at {eighths}/8": flip(eighths) for eighths in range(8)},
}


@pytest.mark.parametrize("name", TORN_LOGS)
async def test_a_torn_log_leaves_a_whole_prefix_that_opens_verifies_and_goes_on(
    restore: Callable[[Change], Path], name: str
) -> None:
    async with SqliteReader.open(restore(bytes)) as reader:
        whole, journal_id = await read(reader), reader.journal_id
    path = restore(TORN_LOGS[name])
    async with SqliteJournal.open(path, controller="heir") as journal:
        prefix = await read(journal)
        (record,) = await journal.append(admit())
        assert journal.repaired is None
        assert journal.journal_id == journal_id
    assert len(whole) >= 150
    assert prefix == whole[: len(prefix)]
    assert (len(prefix) == len(whole)) == (name == "zeros at its end")
    async with SqliteReader.open(path) as reader:
        report = await verify(reader)
    assert (report.intact, report.head.seq) == (True, record.seq)


# ------------------------------------------------------------------------------------------------------ failing appends


async def forbid(journal: SqliteJournal, action: int, argument: str) -> None:
    """Make one kind of statement fail from now on, as an I/O error would."""

    def authorize(code: int, first: str | None, *_: object) -> int:
        return sqlite3.SQLITE_DENY if (code, first) == (action, argument) else sqlite3.SQLITE_OK

    await journal._writing.set_authorizer(authorize)


async def test_a_commit_that_fails_stops_the_opening_with_the_outcome_unknown(path: Path) -> None:
    async with SqliteJournal.open(path, controller="c1") as journal:
        await journal.append(admit(1))
        await forbid(journal, sqlite3.SQLITE_TRANSACTION, "COMMIT")
        with pytest.raises(JournalUnusable, match=r"run.db: appending record 2 failed: .*unknown until the journal is"):
            await journal.append(admit(2))
        assert journal.head.seq == 1
        with pytest.raises(JournalClosed, match="nothing was written"):
            await journal.append(admit(3))
    async with SqliteJournal.open(path, controller="c2") as journal:
        assert rollouts(await read(journal)) == ["r1"]


async def test_every_caller_of_a_failed_group_gets_an_error_of_its_own(path: Path) -> None:
    errors: list[JournalUnusable] = []

    async def append(journal: Journal, number: int) -> None:
        with pytest.raises(JournalUnusable) as failed:
            await journal.append(admit(number))
        errors.append(failed.value)

    async with SqliteJournal.open(path, controller="c1") as journal:
        await forbid(journal, sqlite3.SQLITE_TRANSACTION, "COMMIT")
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(append, journal, number)
    assert len({id(error) for error in errors}) == 5


async def test_an_append_while_another_program_holds_the_write_lock_fails_after_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rc.events.sqlite_thread.BUSY_TIMEOUT_S", 0.2)
    async with SqliteJournal.open(path, controller="c1") as journal:
        with closing(sqlite3.connect(path)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(JournalUnusable, match=r"another program has been writing to it .*: end that program"):
                await journal.append(admit())


async def test_a_record_that_somebody_else_slipped_in_stops_the_opening(path: Path) -> None:
    async with SqliteJournal.open(path, controller="c1") as journal:
        await journal.append(admit(1))
        with closing(sqlite3.connect(path)) as other:
            other.execute(
                "INSERT INTO events SELECT 2, epoch, at, kind, schema, rollout, NULL, engine, version, 2, "
                "body, NULL, hash FROM events"
            )
            other.commit()
        with pytest.raises(JournalUnusable, match=r"record 2 failed: UNIQUE .*another program has written to it"):
            await journal.append(admit(2))


async def test_a_checkpoint_that_fails_stops_the_opening_but_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "CHECKPOINT_BYTES", 1)
    async with SqliteJournal.open(path, controller="c1") as journal:
        await forbid(journal, sqlite3.SQLITE_PRAGMA, "wal_checkpoint")
        await journal.append(admit(1))
        await anyio.sleep(0.05)
        with pytest.raises(JournalClosed, match="stopped by an earlier error"):
            await journal.append(admit(2))
    async with SqliteJournal.open(path, controller="c2") as journal:
        assert rollouts(await read(journal)) == ["r1"]


# ---------------------------------------------------------------------------------------------------------- checkpoints


async def test_the_log_is_copied_into_the_file_while_the_journal_is_open(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "CHECKPOINT_BYTES", 200_000)
    largest = 0
    async with SqliteJournal.open(path, controller="c1") as journal:
        for number in range(100):
            await journal.append(finish(number, tokens=2000))
            largest = max(largest, size(path.with_name("run.db-wal")))
        assert size(path) > 1_000_000
    assert largest < 1_000_000


def size(path: Path) -> int:
    return path.stat().st_size


async def test_a_fenced_writer_does_not_checkpoint(path: Path) -> None:
    async with SqliteJournal.open(path, controller="old") as old:
        await old.append(admit(1))
        async with SqliteJournal.open(path, controller="new", takeover=True) as new:
            await new.append(admit(2))
            before = size(path)
            await old._checkpoint()
            assert size(path) == before
            with pytest.raises(JournalClosed) as refused:
                await old.append(admit(3))
            assert isinstance(refused.value.__cause__, JournalFenced)


# --------------------------------------------------------------------------------------------------------- group commit


async def test_appends_that_wait_share_a_transaction_of_bounded_size(path: Path) -> None:
    statements: list[str] = []
    async with SqliteJournal.open(path, controller="c1") as journal:
        await journal._writing.set_trace_callback(statements.append)
        async with anyio.create_task_group() as tasks:
            for number in range(1000):
                tasks.start_soon(journal.append, admit(number))
        assert journal.head.seq == 1000
    assert 2 <= statements.count("COMMIT") <= 4  # 512 events share one, and the first may go alone


async def test_a_decision_larger_than_a_group_is_still_one_transaction(path: Path) -> None:
    async with SqliteJournal.open(path, controller="c1") as journal:
        records = await journal.append(abort_all(*range(3000)))
    assert len(records) == 3000
    async with SqliteReader.open(path) as reader:
        assert await read(reader) == list(records)


async def test_large_trajectories_are_read_back_as_written(path: Path) -> None:
    async with SqliteJournal.open(path, controller="c1") as journal:
        written = [(await journal.append(finish(number, tokens=20_000)))[0] for number in range(12)]
        assert await read(journal) == written


@pytest.mark.parametrize("after_ms", [0, 5, 15, 30])
async def test_a_host_task_that_asyncio_itself_cancels_still_writes_what_was_queued(path: Path, after_ms: int) -> None:
    inside = asyncio.Event()

    async def body() -> None:
        async with SqliteJournal.open(path, controller="c1") as journal:
            appends = [asyncio.ensure_future(journal.append(admit(number))) for number in range(50)]
            await asyncio.sleep(0)
            inside.set()
            await asyncio.gather(*appends, asyncio.sleep(60))

    task = asyncio.create_task(body())
    await inside.wait()
    await asyncio.sleep(after_ms / 1000)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with SqliteJournal.open(path, controller="c2") as journal:
        assert journal.head.seq == 50
