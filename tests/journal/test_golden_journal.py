"""The journal of the first format opens, verifies, decodes and replays for ever.

``tests/golden/make_journal_v1.py`` made it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rc.decide import decide
from rc.events.codec import encode_event
from rc.events.journal import Record
from rc.events.sqlite import SqliteJournal
from rc.events.sqlite_reader import SqliteReader
from rc.events.verify import verify
from rc.projections.control import ControlState, evolve, state_digest
from tests.journal.decisions import admit, read

GOLDEN = Path(__file__).parents[1] / "golden"

KINDS = frozenset(
    {
        "abort_rollout",
        "admit",
        "begin_update",
        "committed",
        "controller_started",
        "drain",
        "engine_joined",
        "engine_lost",
        "finish_rollout",
        "installed",
        "invalidated",
        "quiesced",
        "request_update",
        "resumed",
        "tainted",
        "update_abandoned",
        "validated",
    }
)
"""Every kind of event of the first format."""

COMMANDS = frozenset(
    {
        "abandon_update",
        "abort_rollouts",
        "admit_rollout",
        "end_rollout",
        "join_engine",
        "lose_engine",
        "report_evidence",
        "start_controller",
        "start_update",
    }
)
REPORTS = frozenset({"look", "pause", "preflight", "install", "caches", "validation", "resume"})


@pytest.fixture
def journal_file(path: Path) -> Path:
    """A copy, since SQLite puts files of its own beside what it opens."""
    shutil.copy(GOLDEN / "journal-v1.db", path)
    path.chmod(0o444)
    return path


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    content: dict[str, Any] = msgspec.json.decode((GOLDEN / "journal-v1.json").read_bytes())
    return content


async def stored(journal_file: Path) -> list[Record]:
    async with SqliteReader.open(journal_file) as reader:
        return await read(reader)


async def test_it_verifies_to_the_same_head(journal_file: Path, expected: dict[str, Any]) -> None:
    async with SqliteReader.open(journal_file) as reader:
        report = await verify(reader)
    last = expected["records"][-1]
    assert report.intact, report.problem
    assert (report.journal_id, report.head.seq, report.head.hash) == (expected["journal_id"], last["seq"], last["hash"])
    assert [span.epoch for span in report.epochs] == [1, 2, 3]


async def test_its_records_are_read_as_they_always_were(journal_file: Path, expected: dict[str, Any]) -> None:
    for record, wanted in zip(await stored(journal_file), expected["records"], strict=True):
        texts = {name: value for name, value in wanted.items() if not name.startswith("decoded_")}
        assert msgspec.to_builtins(record) == texts


async def test_its_events_and_commands_decode_to_what_they_always_said(
    journal_file: Path, expected: dict[str, Any]
) -> None:
    for record, wanted in zip(await stored(journal_file), expected["records"], strict=True):
        assert covers(msgspec.to_builtins(record.event), wanted["decoded_event"])
        assert covers(msgspec.to_builtins(record.decoded_command()), wanted["decoded_command"])


def covers(now: Any, then: Any) -> bool:
    """Whether everything that was said then is said now; later versions may know more."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(name in now and covers(now[name], value) for name, value in then.items())
    if isinstance(then, list):
        return len(now) == len(then) and all(map(covers, now, then))
    return bool(now == then)


async def test_replaying_its_commands_decides_the_same_events_and_states(journal_file: Path) -> None:
    state = ControlState()
    digests = 0
    decided: list[str] = []
    for record in await stored(journal_file):
        command = record.decoded_command()
        if command is not None:
            assert not decided
            decided = [encode_event(event) for event in decide(state, command)]
        assert decided.pop(0) == record.body
        state = evolve(state, record.event)
        if record.state_digest is not None:
            digests += 1
            assert state_digest(state) == record.state_digest, f"record {record.seq}"
    assert digests >= 10


async def test_it_has_every_kind_of_event_command_and_evidence(journal_file: Path, expected: dict[str, Any]) -> None:
    records = expected["records"]
    assert {record["kind"] for record in records} == KINDS
    assert {record["decoded_command"]["command"] for record in records if record["decoded_command"]} == COMMANDS
    evidence = [record["decoded_event"].get("evidence") for record in records]
    assert {report["report"] for report in evidence if report} == REPORTS
    assert [record.kind for record in await stored(journal_file)] == [record["kind"] for record in records]


async def test_it_can_be_continued(journal_file: Path, expected: dict[str, Any]) -> None:
    journal_file.chmod(0o644)  # noqa: ASYNC240
    async with SqliteJournal.open(journal_file, controller="later") as journal:
        (record,) = await journal.append(admit())
    assert (record.epoch, record.seq) == (4, len(expected["records"]) + 1)
