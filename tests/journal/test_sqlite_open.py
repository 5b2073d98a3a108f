"""Opening what is not there, not ours, not whole or not writable: an error that says what, where and what to do."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from blockbuster import BlockBuster

from rc.errors import JournalClosed, JournalUnusable
from rc.events.journal import Record
from rc.events.sqlite import SqliteJournal
from rc.events.sqlite_reader import SqliteReader
from rc.events.sqlite_schema import APPLICATION_ID, SCHEMA_VERSION, sqlite_warnings
from tests.journal.decisions import admit, read
from tests.journal.test_sqlite_processes import child


def foreign_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE songs (title); INSERT INTO songs VALUES ('Re-education')")


def foreign_application(path: Path) -> None:
    foreign_database(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA application_id = 77")


def newer_schema(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION + 1}; CREATE TABLE t (x)"
        )


def lost_meta(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; "
            "CREATE TABLE meta (key, value)"
        )


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (
            lambda path: path.write_text("{}" * 1000),
            "is not an rc journal: it is no SQLite database. Name another file",
        ),
        (lambda path: path.write_text("short"), "is not an rc journal: it is no SQLite database"),
        (lambda path: path.mkdir(), r"is a directory; name the journal file itself, e.g. .*run.db/run.db"),
        (foreign_database, r"database of another program \(application id 0, 1 tables"),
        (foreign_application, r"database of another program \(application id 77"),
        (newer_schema, f"is a journal of schema version {SCHEMA_VERSION + 1}; this rc reads up to .*Upgrade rc"),
        (lost_meta, "its meta table lacks created_at, journal_id"),
    ],
)
async def test_what_is_no_usable_journal_is_refused_and_left_as_it_is(
    path: Path, make: Callable[[Path], object], problem: str
) -> None:
    make(path)
    before = snapshot(path)
    for opening in (SqliteJournal.open(path, controller="c"), SqliteReader.open(path)):
        with pytest.raises(JournalUnusable, match=problem) as refused:
            async with opening:
                pass
        assert str(path) in str(refused.value)
    assert snapshot(path) == before


def snapshot(path: Path) -> dict[str, bytes]:
    """Everything in the file's directory but SQLite's shared memory."""
    files = [file for file in path.parent.rglob("*") if file.is_file() and not file.name.endswith(("-shm", "-wal"))]
    return {file.name: file.read_bytes() for file in files}


async def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run.db"
    with pytest.raises(JournalUnusable, match=r"runs is not a directory; create it first"):
        async with SqliteJournal.open(path, controller="c"):
            pass


async def test_reading_what_is_not_there_does_not_create_it(path: Path) -> None:
    with pytest.raises(JournalUnusable, match=r"there is no journal at .*; name the file that a controller writes"):
        async with SqliteReader.open(path):
            pass
    assert snapshot(path) == {}


@pytest.mark.parametrize("make", [lambda path: path.touch(), lambda path: sqlite3.connect(path).close()])
async def test_an_empty_file_becomes_a_journal(path: Path, make: Callable[[Path], object]) -> None:
    make(path)
    async with SqliteJournal.open(path, controller="c") as journal:
        await journal.append(admit())
    async with SqliteReader.open(path) as reader:
        assert len(await read(reader)) == 1


async def test_a_file_whose_creation_was_interrupted_becomes_a_journal(path: Path) -> None:
    leave_a_hot_rollback_journal(path)
    async with SqliteJournal.open(path, controller="c") as journal:
        await journal.append(admit())
    async with SqliteReader.open(path) as reader:
        assert len(await read(reader)) == 1


def leave_a_hot_rollback_journal(path: Path) -> None:
    """What a process leaves that is killed while it writes the first pages of a database."""
    victim = path.with_name("victim.db")
    with closing(sqlite3.connect(victim)) as connection:
        connection.executescript("PRAGMA cache_size = 1; BEGIN; CREATE TABLE t (x)")
        connection.executemany("INSERT INTO t VALUES (?)", [("x" * 4000,)] * 50)
        shutil.copy(victim, path)
        shutil.copy(victim.with_name("victim.db-journal"), path.with_name("run.db-journal"))
    victim.unlink()
    assert path.stat().st_size > 0


async def test_an_empty_database_has_nothing_to_read(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    with pytest.raises(JournalUnusable, match="no controller has opened it for writing yet"):
        async with SqliteReader.open(path):
            pass


async def test_odd_names_are_files_like_others(tmp_path: Path) -> None:
    path = tmp_path / "a b?c#d%41&mode=ro é.db"
    async with SqliteJournal.open(path, controller="c") as journal:
        await journal.append(admit())
    assert path.stat().st_size > 0
    async with SqliteReader.open(str(path)) as reader:
        assert len(await read(reader)) == 1


async def test_symbolic_links_share_one_lock(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "latest.db"
    link.symlink_to(path)
    async with SqliteJournal.open(path, controller="first"):
        with child("open_once", link) as second:
            assert "is held by controller first" in second.line()


@pytest.fixture
def open_directory(tmp_path: Path) -> Iterator[Path]:
    """A directory that another user can reach, with nothing of ours in the way."""
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    yield tmp_path
    tmp_path.chmod(0o755)


async def test_a_file_in_a_read_only_directory_can_be_read_but_not_written(open_directory: Path) -> None:
    path = open_directory / "run.db"
    async with SqliteJournal.open(path, controller="c") as journal:
        await journal.append(admit())
    restrict({open_directory / "run.db.lock": None, open_directory: 0o555})
    with child("open_once", path, "--unprivileged") as process:
        refused = process.line()
    assert refused.startswith("JournalUnusable")
    assert "run.db.lock cannot be written (Permission denied). Make the directory writable" in refused
    with child("read", path, "--unprivileged") as process:
        assert process.line() == "1"


async def test_a_read_only_file_is_refused_for_writing_with_what_to_do(open_directory: Path) -> None:
    path = open_directory / "run.db"
    async with SqliteJournal.open(path, controller="c") as journal:
        await journal.append(admit())
    restrict({open_directory / "run.db.lock": None, path: 0o444, open_directory: 0o777})
    with child("open_once", path, "--unprivileged") as process:
        refused = process.line()
    assert refused.startswith(f"JournalUnusable {path} cannot be opened: attempt to write a readonly database. Check ")


def restrict(modes: dict[Path, int | None]) -> None:
    """Set modes; None removes the file."""
    for path, mode in modes.items():
        path.unlink() if mode is None else path.chmod(mode)


async def test_a_database_that_another_program_writes_to_is_refused_after_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rc.events.sqlite_thread.BUSY_TIMEOUT_S", 0.2)
    async with SqliteJournal.open(path, controller="c"):
        pass
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalUnusable, match=r"is locked: another program has been writing to it for 0.2 s"):
            async with SqliteJournal.open(path, controller="c"):
                pass
    async with SqliteJournal.open(path, controller="c") as journal:
        assert journal.epoch == 2


async def test_what_durability_rests_on_is_set(path: Path) -> None:
    async with SqliteJournal.open(path, controller="c") as journal:
        pragmas = {}
        for name in ("journal_mode", "synchronous", "wal_autocheckpoint", "application_id", "user_version"):
            (row,) = await journal._writing.execute_fetchall(f"PRAGMA {name}")
            pragmas[name] = row[0]
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": 2,
        "wal_autocheckpoint": 0,
        "application_id": APPLICATION_ID,
        "user_version": 1,
    }


async def test_a_closed_file_is_whole_without_its_log(path: Path, tmp_path: Path) -> None:
    async with SqliteJournal.open(path, controller="c") as journal:
        for number in range(20):
            await journal.append(admit(number))
    assert sorted(os.listdir(tmp_path)) == ["run.db", "run.db.lock"]  # noqa: PTH208
    copy = tmp_path / "copy.db"
    shutil.copy(path, copy)
    async with SqliteReader.open(copy) as reader:
        assert len(await read(reader)) == 20


async def test_a_closed_file_is_whole_also_while_readers_have_it_open(path: Path, tmp_path: Path) -> None:
    async with SqliteJournal.open(path, controller="c") as journal:
        await journal.append(admit(1))
    async with SqliteReader.open(path) as reader:
        async with SqliteJournal.open(path, controller="c") as journal:
            await journal.append(admit(2))
            assert len(await read(reader)) == 2
        copy = tmp_path / "copy.db"
        shutil.copy(path, copy)
        assert len(await read(reader)) == 2
    async with SqliteReader.open(copy) as reader:
        assert len(await read(reader)) == 2


async def test_an_open_file_is_copied_with_vacuum_into(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    async with SqliteJournal.open(path, controller="c") as journal:
        for number in range(20):
            await journal.append(admit(number))
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            connection.execute("VACUUM INTO ?", (str(copy),))
        await journal.append(admit(20))
    async with SqliteJournal.open(copy, controller="c") as journal:
        assert len(await read(journal)) == 20


async def test_nothing_here_blocks_the_event_loop(path: Path, no_blocking: BlockBuster) -> None:
    async with SqliteJournal.open(path, controller="c") as journal, SqliteReader.open(path) as reader:
        await journal.append(admit())
        assert len(await read(journal)) == len(await read(reader)) == 1
        await reader.lease()


async def test_a_journal_that_was_closed_can_no_longer_be_read_through(path: Path) -> None:
    async with SqliteJournal.open(path, controller="c") as journal, SqliteReader.open(path) as reader:
        await journal.append(admit())
    for closed in (journal, reader):
        with pytest.raises(JournalClosed, match="open it again"):
            await read(closed)


async def test_following_ones_own_journal_ends_when_that_is_closed(path: Path) -> None:
    seen: list[int] = []

    async def follow(journal: SqliteJournal) -> None:
        with pytest.raises(JournalClosed):
            await collect(journal.follow(), seen)

    async with anyio.create_task_group() as tasks, SqliteJournal.open(path, controller="c") as journal:
        tasks.start_soon(follow, journal)
        await journal.append(admit())
        await anyio.sleep(0.05)
    assert seen == [1]


async def collect(records: AsyncIterator[Record], seen: list[int]) -> None:
    async for record in records:
        seen += [record.seq]


def test_trio_is_pointed_to_the_journal_that_it_can_use(path: Path) -> None:
    async def open_on_trio() -> None:
        async with SqliteJournal.open(path, controller="c"):
            pass

    with pytest.raises(JournalUnusable, match="needs asyncio, since aiosqlite does; on trio, use MemoryJournal"):
        anyio.run(open_on_trio, backend="trio")


async def test_a_sqlite_without_strict_tables_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 0))
    with pytest.raises(JournalUnusable, match=r"too old for a journal: 3.37 or newer is needed"):
        async with SqliteJournal.open(path, controller="c"):
            pass


@pytest.mark.parametrize(
    ("pragma", "answer", "problem"),
    [
        ("PRAGMA journal_mode = WAL", "delete", "cannot use a write-ahead log here .*use a local disk"),
        ("PRAGMA synchronous", 1, "did not accept synchronous = FULL"),
    ],
)
async def test_a_file_system_that_cannot_keep_the_promises_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, pragma: str, answer: object, problem: str
) -> None:
    class Deaf(sqlite3.Connection):
        """Answers one pragma as SQLite does where it cannot do what was asked."""

        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            return super().execute("SELECT ?", (answer,)) if sql == pragma else super().execute(sql, parameters)

    connect = partial(sqlite3.connect, factory=Deaf)
    monkeypatch.setattr("rc.events.sqlite_thread.sqlite3.connect", connect)
    with pytest.raises(JournalUnusable, match=problem):
        async with SqliteJournal.open(path, controller="c"):
            pass


async def test_the_sqlite_in_use_is_judged(path: Path) -> None:
    async with SqliteJournal.open(path, controller="c") as journal, SqliteReader.open(path) as reader:
        assert journal.warnings == reader.warnings == sqlite_warnings(sqlite3.sqlite_version_info)


async def test_the_lease_says_who_writes(path: Path) -> None:
    async with SqliteJournal.open(path, controller="writer-7") as journal, SqliteReader.open(path) as reader:
        lease = await reader.lease()
        assert lease is not None
        assert (lease.controller, lease.pid, lease.epoch) == ("writer-7", os.getpid(), journal.epoch)


@pytest.mark.parametrize(
    ("version", "affected"),
    [
        ((3, 6, 23), False),
        ((3, 7, 0), True),
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 0), True),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 52, 0), False),
    ],
)
def test_versions_with_the_wal_reset_bug_are_named(version: tuple[int, int, int], affected: bool) -> None:
    warnings = sqlite_warnings(version)
    assert bool(warnings) == affected
    assert not affected or f"SQLite {'.'.join(map(str, version))} has the WAL-reset bug" in warnings[0]
