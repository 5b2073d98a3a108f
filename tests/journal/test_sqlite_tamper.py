"""What is changed in a journal file behind its back is found at the record that was changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest

from rc.errors import JournalCorrupt, JournalUnusable
from rc.events.sqlite import SqliteJournal
from rc.events.sqlite_reader import SqliteReader
from rc.events.verify import verify
from tests.journal.decisions import abort_all, admit, finish, read, rollouts


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven records: r1 admitted (1), r2 and r3 aborted (2, 3), r1 finished (4); in epoch 2, r4 to r6 aborted (5-7)."""
    path = tmp_path_factory.mktemp("template") / "run.db"

    async def write() -> None:
        async with SqliteJournal.open(path, controller="c1") as journal:
            for decision in (admit(1), abort_all(2, 3), finish(1)):
                await journal.append(decision)
        async with SqliteJournal.open(path, controller="c2") as journal:
            await journal.append(abort_all(4, 5, 6))

    anyio.run(write)
    return path


@pytest.fixture
def journal_file(template: Path, path: Path) -> Path:
    shutil.copy(template, path)
    return path


def change(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


class Tampering(NamedTuple):
    script: str
    seq: int
    problem: str


TAMPERINGS = {
    "a body's value": Tampering(
        "UPDATE events SET body = replace(body, '\"r1\"', '\"rX\"') WHERE seq = 1", 1, "does not match its hash"
    ),
    "a body's whitespace": Tampering(
        "UPDATE events SET body = replace(body, ',', ', ') WHERE seq = 4", 4, "does not match its hash"
    ),
    "a body and its column": Tampering(
        "UPDATE events SET body = replace(body, 'r2', 'rX'), rollout = 'rX' WHERE seq = 2", 2, "does not match its hash"
    ),
    "a hash": Tampering("UPDATE events SET hash = upper(hash) WHERE seq = 3", 3, "does not match its hash"),
    "the last hash": Tampering("UPDATE events SET hash = '' WHERE seq = 7", 7, "does not match its hash"),
    "a time": Tampering("UPDATE events SET at = at + 0.001 WHERE seq = 4", 4, "does not match its hash"),
    "a kind": Tampering("UPDATE events SET kind = 'drain' WHERE seq = 4", 4, "does not match its hash"),
    "a schema version": Tampering("UPDATE events SET schema = 2 WHERE seq = 4", 4, "does not match its hash"),
    "an epoch raised": Tampering("UPDATE events SET epoch = 2 WHERE seq = 4", 4, "does not match its hash"),
    "an epoch lowered": Tampering("UPDATE events SET epoch = 0 WHERE seq = 4", 4, "has epoch 0 behind one of epoch 1"),
    "a digest": Tampering("UPDATE events SET state_digest = 'd2' WHERE seq = 3", 3, "does not match its hash"),
    "a digest removed": Tampering("UPDATE events SET state_digest = NULL WHERE seq = 3", 3, "does not match its hash"),
    "a digest added": Tampering("UPDATE events SET state_digest = 'd1' WHERE seq = 4", 4, "does not match its hash"),
    "a rollout column": Tampering(
        "UPDATE events SET rollout = 'rX' WHERE seq = 4",
        4,
        "columns that disagree with its body: rollout is 'rX', not 'r1'",
    ),
    "an update column": Tampering("UPDATE events SET update_id = 'u' WHERE seq = 4", 4, "update is 'u', not None"),
    "an engine column": Tampering("UPDATE events SET engine = NULL WHERE seq = 2", 2, "engine is None, not 'http"),
    "a version column": Tampering("UPDATE events SET version = 4 WHERE seq = 1", 1, "version is 4, not 3"),
    "a cause": Tampering("UPDATE events SET cause = 4 WHERE seq = 6", 6, "does not belong to the decision at 5"),
    "a cause of one that stands alone": Tampering(
        "UPDATE events SET cause = 2 WHERE seq = 4", 4, "names 2 as its cause"
    ),
    "two rows swapped": Tampering(
        "UPDATE events SET seq = 100 WHERE seq = 2; UPDATE events SET seq = 2 WHERE seq = 3; "
        "UPDATE events SET seq = 3 WHERE seq = 100",
        2,
        "does not match its hash",
    ),
    "a row deleted": Tampering("DELETE FROM events WHERE seq = 4", 4, r"is missing \(the next one is 5\)"),
    "a row deleted within a decision": Tampering("DELETE FROM events WHERE seq = 6", 6, "is missing"),
    "the first row deleted": Tampering("DELETE FROM events WHERE seq = 1", 1, "is missing"),
    "the first rows deleted with their commands": Tampering(
        "DELETE FROM events WHERE seq < 4; DELETE FROM commands WHERE seq < 4", 1, r"is missing \(the next one is 4\)"
    ),
    "a row added": Tampering(
        "INSERT INTO events SELECT 8, 2, at, kind, schema, rollout, update_id, engine, version, 8, body, NULL, hash "
        "FROM events WHERE seq = 4; INSERT INTO commands SELECT 8, events, body FROM commands WHERE seq = 4",
        8,
        "does not match its hash",
    ),
    "a row added to a decision": Tampering(
        "INSERT INTO events SELECT 8, 2, at, kind, schema, rollout, update_id, engine, version, cause, body, NULL, "
        "hash FROM events WHERE seq = 7",
        8,
        "names 5 as its cause, a decision that is complete without it",
    ),
    "a command": Tampering(
        "UPDATE commands SET body = replace(body, 'r2', 'rX') WHERE seq = 2", 2, "does not match its hash"
    ),
    "a command deleted": Tampering(
        "DELETE FROM commands WHERE seq = 2", 2, "begins a decision but its command is missing"
    ),
    "the last command deleted": Tampering("DELETE FROM commands WHERE seq = 5", 5, "its command is missing"),
    "a command added": Tampering("INSERT INTO commands VALUES (3, 1, '{}')", 3, "has a command of its own"),
    "a command's count of events lowered": Tampering(
        "UPDATE commands SET events = 1 WHERE seq = 2", 2, "does not match its hash"
    ),
    "a command's count of events zeroed": Tampering(
        "UPDATE commands SET events = 0 WHERE seq = 4", 4, "its command is missing"
    ),
    "the journal's id": Tampering(
        "UPDATE meta SET value = 'other' WHERE key = 'journal_id'", 1, "does not match its hash"
    ),
}


@pytest.mark.parametrize("name", TAMPERINGS)
async def test_tampering_is_found_at_the_record_by_opening_and_by_an_audit(journal_file: Path, name: str) -> None:
    script, seq, problem = TAMPERINGS[name]
    change(journal_file, script)
    before = dump(journal_file)
    with pytest.raises(JournalCorrupt, match=problem) as refused:
        async with SqliteJournal.open(journal_file, controller="c3"):
            pass
    assert refused.value.seq == seq
    assert str(refused.value).startswith(f"{journal_file}: record {seq} ")
    assert dump(journal_file) == before
    async with SqliteReader.open(journal_file) as reader:
        report = await verify(reader)
    assert report.problem == str(refused.value)
    assert report.problem_seq == seq
    assert report.records < seq


async def test_records_before_a_tampered_one_can_be_read(journal_file: Path) -> None:
    change(journal_file, "UPDATE events SET at = 0 WHERE seq = 4")
    seen: list[int] = []
    async with SqliteReader.open(journal_file) as reader:
        with pytest.raises(JournalCorrupt):
            await collect(reader, seen)
    assert seen == [1, 2, 3]


async def collect(reader: SqliteReader, seen: list[int]) -> None:
    async for record in reader.records():
        seen += [record.seq]


class TornTail(NamedTuple):
    script: str
    left: list[str]
    repaired: str


TORN_TAILS = {
    "the last row of a decision": TornTail(
        "DELETE FROM events WHERE seq = 7", ["r1", "r2", "r3", "r1"], "the decision at 5 has 2 of its 3 events"
    ),
    "the last two rows of a decision": TornTail(
        "DELETE FROM events WHERE seq IN (6, 7)", ["r1", "r2", "r3", "r1"], "the decision at 5 has 1 of its 3 events"
    ),
    "all rows of a decision but not its command": TornTail(
        "DELETE FROM events WHERE seq >= 5", ["r1", "r2", "r3", "r1"], "a command at 5 has none of its events"
    ),
    "all but the first row of the only decision": TornTail(
        "DELETE FROM events WHERE seq >= 3; DELETE FROM commands WHERE seq > 2",
        ["r1"],
        "the decision at 2 has 1 of its 2",
    ),
}


@pytest.mark.parametrize("name", TORN_TAILS)
async def test_a_decision_that_is_not_whole_is_removed_from_the_end_and_reported(journal_file: Path, name: str) -> None:
    script, left, repaired = TORN_TAILS[name]
    change(journal_file, script)
    async with SqliteJournal.open(journal_file, controller="c3") as journal:
        assert journal.repaired is not None
        assert repaired in journal.repaired
        assert "never acknowledged" in journal.repaired
        assert rollouts(await read(journal)) == left
        await journal.append(admit(9))
    async with SqliteJournal.open(journal_file, controller="c4") as journal:
        assert journal.repaired is None
        assert rollouts(await read(journal)) == [*left, "r9"]


async def test_a_reader_stops_before_a_decision_that_is_not_whole(journal_file: Path) -> None:
    change(journal_file, "DELETE FROM events WHERE seq = 7")
    async with SqliteReader.open(journal_file) as reader:
        assert [record.seq for record in await read(reader)] == [1, 2, 3, 4]
        assert [record.seq for record in await read(reader, after=5)] == []
        report = await verify(reader)
    assert report.intact
    assert report.torn_tail == "the decision at 5 has 2 of its 3 events"


async def test_an_epoch_is_never_used_twice_even_if_the_lease_row_is_lost(journal_file: Path) -> None:
    change(journal_file, "DELETE FROM lease")
    async with SqliteJournal.open(journal_file, controller="c3") as journal:
        assert journal.epoch == 3


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("kind", "holographic", "unknown event kind 'holographic'"),
        ("schema", 99, r"has schema version 99; this rc reads up to \d+. Upgrade rc"),
        ("body", '{"kind":"admit"}', "missing required field"),
        ("body", "not JSON", "cannot be read"),
        ("body", '{"kind":"drain","at":1001.0,"update":"u","engine":"e","active":0}', "body says it is drain"),
    ],
)
async def test_an_authentic_record_of_a_newer_rc_is_refused_by_name_and_seq(
    path: Path, column: str, value: object, problem: str
) -> None:
    async with SqliteJournal.open(path, controller="c1") as journal:
        await journal.append(admit(0))
        await journal.append(admit(1))
        records = await read(journal)
    rewrite_last(path, records[0].hash, **{column: value})
    with pytest.raises(JournalUnusable, match=f"record 2 cannot be read: .*{problem}") as refused:
        async with SqliteJournal.open(path, controller="c2"):
            pass
    assert str(refused.value).startswith(f"{path}: ")
    async with SqliteReader.open(path) as reader:
        report = await verify(reader)
    assert (report.intact, report.records, report.problem_seq) == (False, 1, 2)


async def test_columns_are_held_against_the_body_even_where_the_hash_fits(path: Path) -> None:
    async with SqliteJournal.open(path, controller="c1") as journal:
        await journal.append(admit(0))
        await journal.append(admit(1))
        records = await read(journal)
    rewrite_last(path, records[0].hash, at=5.0)
    with pytest.raises(JournalCorrupt, match=r"record 2 is dated 5.0 where its body says 1001.0"):
        async with SqliteJournal.open(path, controller="c2"):
            pass


def rewrite_last(path: Path, previous: str, **columns: object) -> None:
    """Change record 2 and give it the hash that fits, as a newer rc would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM events WHERE seq = 2").fetchone()) | columns
        command = connection.execute("SELECT body FROM commands WHERE seq = 2").fetchone()["body"]
        content = [row[name] for name in ("seq", "epoch", "at", "kind", "schema", "body", "cause")]
        content += [command, 1, row["state_digest"]]
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        row["hash"] = hashlib.sha256((previous + text).encode()).hexdigest()
        connection.execute(
            "UPDATE events SET at = :at, kind = :kind, schema = :schema, body = :body, hash = :hash WHERE seq = 2", row
        )


@pytest.mark.parametrize("victim", ["events", "commands"])
async def test_pages_that_are_garbage_are_refused_with_a_journal_error(journal_file: Path, victim: str) -> None:
    garble_table(journal_file, victim)
    with pytest.raises(JournalCorrupt, match=r"record 1 .*malformed"):
        async with SqliteJournal.open(journal_file, controller="c3"):
            pass
    async with SqliteReader.open(journal_file) as reader:
        report = await verify(reader)
    assert "malformed" in str(report.problem)


def garble_table(path: Path, table: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    content = bytearray(path.read_bytes())
    content[(root - 1) * size : root * size] = b"\xa5" * size
    path.write_bytes(content)


async def test_text_that_is_not_utf8_is_refused_with_a_journal_error(journal_file: Path) -> None:
    change(journal_file, "UPDATE events SET body = CAST(x'ff' AS TEXT) WHERE seq = 4")
    with pytest.raises(JournalCorrupt, match=r"record 1 .*UTF-8"):
        async with SqliteJournal.open(journal_file, controller="c3"):
            pass
