"""Make ``journal-v1.db``, the journal of the first released format, and ``journal-v1.json``, what must be read from it.

Run from the repository's root: ``python tests/golden/make_journal_v1.py``. Once the format is released, both files stay
for ever: whatever later versions write, they must go on reading this. The history below has every kind of event and of
evidence that the format has, in an order that real controllers could have produced: commands go through `decide`.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import msgspec

from rc.commands import (
    AbandonUpdate,
    AbortRollouts,
    AdmitRollout,
    Command,
    EndRollout,
    JoinEngine,
    LoseEngine,
    ReportEvidence,
    StartController,
    StartUpdate,
)
from rc.decide import decide
from rc.events.codec import as_recorded
from rc.events.journal import Decision, Record
from rc.events.sqlite import SqliteJournal
from rc.events.sqlite_reader import SqliteReader
from rc.events.sqlite_schema import create_schema
from rc.events.types import Span, Turn
from rc.evidence import (
    CacheReport,
    Evidence,
    InstallReport,
    LookReport,
    Observation,
    PauseReport,
    PreflightReport,
    ResumeReport,
    ValidationReport,
)
from rc.projections.control import CHECKPOINTS, ControlState, evolve, state_digest
from rc.versions import WeightIdentity

HERE = Path(__file__).parent
ENGINE = "http://127.0.0.1:8000"
JOURNAL_ID = "golden-journal-v1"
MANIFEST = "5e" * 32
ODD = "r3 – ünïcode/💾"


class Clock:
    """Gives times with all the digits that real ones have."""

    def __init__(self) -> None:
        self.now = 1_788_000_000.0

    def __call__(self) -> float:
        self.now += 0.015625 + 1e-5
        return self.now


def history(at: Clock) -> Iterator[list[Command]]:
    """Give the commands of each opening of the journal."""
    yield [*first_opening(at)]
    yield [*second_opening(at)]
    yield [*third_opening(at)]


def first_opening(at: Clock) -> Iterator[Command]:
    """Adopt what the engine loaded; rollouts; an update; two that are abandoned; one in which the controller dies."""
    yield StartController(at=at(), controller="trainer-a", epoch=1)
    yield join(at(), "boot-1")
    yield StartUpdate(at=at(), update="u0", path="adopt", identity=WeightIdentity(run="initial", step=0))
    yield from install(at, "boot-1", "default", "rc-0")
    yield AdmitRollout(at=at(), rollout="r1", lease_s=600.0)
    yield AdmitRollout(at=at(), rollout="r2", lease_s=0.5)
    yield EndRollout(at=at(), rollout="r1", turns=(turn("rc-0", 3), turn("rc-0", 2, bare=True)))
    yield AdmitRollout(at=at(), rollout=ODD, lease_s=600.0)
    yield AdmitRollout(at=at(), rollout="r4", lease_s=600.0)
    reason = 'its owner raised ValueError("\\no")\n'
    yield AbortRollouts(at=at(), rollouts=("r2",), reason=reason, turns=(turn("rc-0", 1),))
    yield AdmitRollout(at=at(), rollout="r7", lease_s=600.0)
    yield AbortRollouts(at=at(), rollouts=("r7", "r4"), reason="the trainer was closed")
    yield update(at(), "u1", step=1)
    yield EndRollout(at=at(), rollout=ODD, turns=(turn("rc-0", 4),))
    yield from install(at, "boot-1", "rc-0", "rc-1")
    yield update(at(), "u2", step=2)
    yield AbandonUpdate(at=at(), update="u2", reason="cancelled by its caller")
    yield see(at(), ResumeReport(observed=look("boot-1", "rc-1", paused=False), took_s=0.01))
    yield update(at(), "u3", step=2)
    yield see(at(), PauseReport(observed=look("boot-1", "rc-1"), took_s=0.02))
    yield see(at(), PreflightReport(observed=look("boot-1", "rc-1"), problem="lm_head.weight is missing"))
    yield see(at(), ResumeReport(observed=look("boot-1", "rc-1", paused=False)))
    yield update(at(), "u4", step=3)
    yield see(at(), PauseReport(observed=look("boot-1", "rc-1")))
    yield see(at(), PreflightReport(observed=look("boot-1", "rc-1")))


def second_opening(at: Clock) -> Iterator[Command]:
    """The engine shows that the update was complete: it goes on. Then the controller dies with a rollout active."""
    yield StartController(at=at(), controller="trainer-b", epoch=2)
    yield see(at(), LookReport(observed=look("boot-1", "rc-2")))
    yield from publish(at, "boot-1", "rc-2")
    yield AdmitRollout(at=at(), rollout="r5", lease_s=1e-7)


def third_opening(at: Clock) -> Iterator[Command]:
    """An update breaks in the middle; the engine is restarted, published to, used, and lost."""
    yield StartController(at=at(), controller="trainer-c", epoch=3)
    yield update(at(), "u5", step=4)
    yield see(at(), PauseReport(observed=look("boot-1", "rc-2")))
    yield see(at(), PreflightReport(observed=look("boot-1", "rc-2")))
    broken = Observation(boot="boot-1", problem="GET /get_weight_version: no answer in 5 s")
    yield see(at(), InstallReport(observed=broken, mutation="possible", sent_bytes=2**40, problem="connection reset"))
    yield join(at(), "boot-2")
    yield update(at(), "u6", step=5)
    yield from install(at, "boot-2", "default", "rc-4")
    yield AdmitRollout(at=at(), rollout="r6", lease_s=1e22)
    yield EndRollout(at=at(), rollout="r6", turns=(turn("rc-4", 2), turn("rc-3", 2)))
    yield join(at(), "boot-3")
    yield LoseEngine(at=at(), engine=ENGINE, reason="exit code -9")


def join(at: float, boot: str) -> JoinEngine:
    return JoinEngine(
        at=at,
        engine=ENGINE,
        observed=look(boot, "default", paused=False),
        profile="stock",
        vllm="0.32.0",
        model="tiny-gpt",
        max_model_len=512,
        manifest_digest=MANIFEST,
    )


def look(boot: str, label: str, *, paused: bool = True) -> Observation:
    return Observation(boot=boot, label=label, paused=paused)


def see(at: float, evidence: Evidence) -> ReportEvidence:
    return ReportEvidence(at=at, engine=ENGINE, evidence=evidence)


def update(at: float, name: str, *, step: int) -> StartUpdate:
    return StartUpdate(
        at=at,
        update=name,
        path="one_phase",
        identity=WeightIdentity(run="grpo", step=step, checkpoint=f"/ckpt/{step}", content_digest="c0" * 32),
        backend="gloo",
        manifest_digest=MANIFEST,
        nbytes=123_456_789_012,
    )


def install(at: Clock, boot: str, before: str, label: str) -> Iterator[Command]:
    """Every step of an update that goes well."""
    yield see(at(), PauseReport(observed=look(boot, before), took_s=0.125))
    yield see(at(), PreflightReport(observed=look(boot, before), took_s=0.0625))
    yield see(at(), InstallReport(observed=look(boot, label), mutation="complete", sent_bytes=4096, took_s=1.5))
    yield from publish(at, boot, label)


def publish(at: Clock, boot: str, label: str) -> Iterator[Command]:
    """Its steps once the weights are installed."""
    caches = CacheReport(observed=look(boot, label), prefix=True, multimodal=True, encoder=True, took_s=0.001)
    yield see(at(), caches)
    yield see(at(), ValidationReport(observed=look(boot, label), checks=("boot", "label", "paused"), took_s=1e-5))
    yield see(at(), ResumeReport(observed=look(boot, label, paused=False)))


def turn(label: str, tokens: int, *, bare: bool = False) -> Turn:
    """A request; ``bare`` has nothing that may be left out."""
    if bare:
        return Turn(prompt_token_ids=(0,), token_ids=tuple(range(tokens)))
    return Turn(
        prompt_token_ids=(1, 2, 50_256),
        token_ids=tuple(range(tokens)),
        logprobs=tuple(-(10.0 ** -(5 * token)) for token in range(tokens)),
        spans=(Span(label=label, start=0, end=1), Span(label=label, start=1, end=tokens)),
        finish_reason="stop",
        sampling={"temperature": 0.7, "top_p": 1, "stop": ["\n\n"], "seed": 2**62, "logit_bias": {"7": -100.0}},
        cached_tokens=0,
        request="q-1f",
        started_at=1_788_000_000.25,
        finished_at=1_788_000_001.5,
    )


async def write(path: Path) -> None:
    """Write the history, as three controllers would have."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        create_schema(connection, journal_id=JOURNAL_ID, created_at="2026-08-29T10:40:00+00:00")
    state = ControlState()
    for opening in history(Clock()):
        async with SqliteJournal.open(path, controller="golden") as journal:
            for command in map(as_recorded, opening):
                digests: list[str | None] = []
                events = decide(state, command)
                for event in events:
                    state = evolve(state, event)
                    digests.append(state_digest(state) if event.kind in CHECKPOINTS else None)
                await journal.append(Decision(command=command, events=events, digests=tuple(digests)))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "UPDATE lease SET controller = 'trainer-c', host = 'node-1', pid = 1234, acquired_at = 1.788e9"
        )
        connection.commit()
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    path.with_name(path.name + ".lock").unlink()


async def dump(path: Path) -> dict[str, Any]:
    """Give everything that is read from a journal, for a person to review and a test to compare."""
    async with SqliteReader.open(path) as reader:
        records = [record async for record in reader.records()]
        return {"journal_id": reader.journal_id, "records": [dump_record(record) for record in records]}


def dump_record(record: Record) -> dict[str, Any]:
    """Give a record's fields, the texts as they are and what they decode to."""
    fields: dict[str, Any] = msgspec.to_builtins(record)
    fields["decoded_event"] = msgspec.to_builtins(record.event)
    fields["decoded_command"] = msgspec.to_builtins(record.decoded_command())
    return fields


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal-v1.db"
        await write(path)
        content = msgspec.json.encode(await dump(path))
        shutil.copy(path, HERE)
    await anyio.Path(HERE / "journal-v1.json").write_bytes(msgspec.json.format(content, indent=1) + b"\n")


if __name__ == "__main__":
    anyio.run(main)
