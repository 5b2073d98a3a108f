"""The tables and views that people read with sqlite3 or Datasette."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rc.commands import Command, ReportEvidence
from rc.events.journal import Decision
from rc.events.sqlite import SqliteJournal
from rc.events.types import (
    AbortRollout,
    Admit,
    Committed,
    Drain,
    Event,
    FinishRollout,
    Quiesced,
    RequestUpdate,
    Resumed,
    Tainted,
    Turn,
    UpdateAbandoned,
)
from rc.evidence import LookReport, Observation, PauseReport, ResumeReport
from rc.versions import WeightIdentity

LOOK = Observation(boot="b", label="rc-0", paused=False)
TURNS = (
    Turn(prompt_token_ids=(1,), token_ids=(1, 2, 3)),
    Turn(prompt_token_ids=(1, 2, 3, 4), token_ids=(5, 6)),
)


def update(name: str, version: int, start: float, *ends: Event) -> Iterator[Event]:
    identity = WeightIdentity(run="r1", step=version * 10, checkpoint=f"/ckpt/{version}")
    yield RequestUpdate(at=start, update=name, target=version, identity=identity, path="one_phase", engines=("e",))
    yield Drain(at=start, update=name, engine="e", active=1)
    yield Quiesced(at=start + 2.0, update=name, engine="e", evidence=PauseReport(observed=LOOK))
    yield from ends


EVENTS: tuple[Event, ...] = (
    *update(
        "u0",
        0,
        100.0,
        Resumed(at=102.5, update="u0", engine="e", evidence=ResumeReport(observed=LOOK)),
        Committed(at=102.5, update="u0", version=0, identity=WeightIdentity(run="r1", step=0), engines=("e",)),
    ),
    Admit(at=110.0, rollout="a", engine="e", version=0, lease_s=60.0),
    Admit(at=111.0, rollout="b", engine="e", version=0, lease_s=60.0),
    FinishRollout(at=115.5, rollout="a", engine="e", version=0, turns=TURNS),
    Admit(at=116.0, rollout="a", engine="e", version=0, lease_s=60.0),
    AbortRollout(at=117.0, rollout="a", engine="e", version=0, reason="cancelled"),
    *update("u1", 1, 120.0, UpdateAbandoned(at=123.0, update="u1", reason="stopped by the user")),
    *update("u2", 1, 130.0, Tainted(at=133.0, update="u2", engine="e", reason="the transfer broke")),
    *update("u3", 2, 140.0),
)


@pytest.fixture
async def journal_file(path: Path) -> Path:
    command: Command = ReportEvidence(at=1.0, engine="e", evidence=LookReport(observed=LOOK))
    async with SqliteJournal.open(path, controller="c") as journal:
        for event in EVENTS:
            await journal.append(Decision(command=command, events=(event,), digests=(None,)))
    return path


def rows(path: Path, query: str) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(query)]


async def test_the_rollouts_view_has_a_row_for_every_admission(journal_file: Path) -> None:
    found = rows(journal_file, "SELECT * FROM rollouts ORDER BY admit_seq")
    assert [(row["rollout"], row["outcome"], row["duration_s"], row["reason"]) for row in found] == [
        ("a", "finished", 5.5, None),
        ("b", "active", None, None),
        ("a", "aborted", 1.0, "cancelled"),
    ]
    assert [(row["turns"], row["tokens"]) for row in found] == [(2, 5), (None, None), (None, None)]
    assert found[0] | {"admit_seq": 6, "end_seq": 8, "engine": "e", "version": 0} == found[0]


async def test_the_updates_view_says_how_each_ended_and_what_it_took(journal_file: Path) -> None:
    found = rows(journal_file, "SELECT * FROM updates ORDER BY first_seq")
    assert [(row["update_id"], row["version"], row["outcome"], row["reason"]) for row in found] == [
        ("u0", 0, "committed", None),
        ("u1", 1, "abandoned", "stopped by the user"),
        ("u2", 1, "tainted", "the transfer broke"),
        ("u3", 2, "in progress", None),
    ]
    assert [(row["drain_s"], row["paused_s"]) for row in found] == [(2.0, 0.5), (2.0, None), (2.0, None), (2.0, None)]
    assert (found[1]["run"], found[1]["step"], found[1]["path"]) == ("r1", 10, "one_phase")


async def test_the_versions_view_counts_the_rollouts_of_each_version(journal_file: Path) -> None:
    (found,) = rows(journal_file, "SELECT * FROM versions")
    assert (found["version"], found["update_id"], found["run"], found["step"]) == (0, "u0", "r1", 0)
    assert (found["admitted"], found["finished"], found["aborted"]) == (3, 1, 1)


async def test_tables_refuse_values_of_another_type(journal_file: Path) -> None:
    with closing(sqlite3.connect(journal_file)) as connection:
        strict = connection.execute("SELECT name FROM pragma_table_list WHERE schema = 'main' AND strict ORDER BY name")
        assert [name for (name,) in strict] == ["commands", "events", "lease", "meta"]
        with pytest.raises(sqlite3.IntegrityError, match="cannot store TEXT value in INTEGER column"):
            connection.execute("UPDATE events SET epoch = 'first'")


async def test_meta_names_the_journal_and_its_schema(journal_file: Path) -> None:
    meta = {row["key"]: row["value"] for row in rows(journal_file, "SELECT * FROM meta")}
    assert meta.keys() == {"schema_version", "journal_id", "created_at"}
    assert meta["schema_version"] == "1"
    assert len(meta["journal_id"]) == 36
