"""The chain as documented, computed here a second time with the standard library alone."""

from __future__ import annotations

import hashlib
import json

import pytest

from rc.commands import StartUpdate
from rc.errors import JournalCorrupt
from rc.events.chain import Position, follow_chain, ids_of
from rc.events.codec import UnreadableEvent, decode_event
from rc.events.journal import Decision, Head, Record, chain_records, encode_decision, genesis_hash
from rc.events.types import EVENT_TYPES, BeginUpdate, Committed, Drain, Event, RequestUpdate, Tainted
from rc.evidence import Observation, PreflightReport
from rc.versions import WeightIdentity
from tests.journal.decisions import abort_all, admit, finish

JOURNAL_ID = "2f5a"
IDENTITY = WeightIdentity(run="r", step=4)


def records() -> list[Record]:
    head = Head(seq=0, hash=genesis_hash(JOURNAL_ID))
    chained: list[Record] = []
    for epoch, decision in ((1, admit(1)), (1, abort_all(2, 3)), (2, finish(1))):
        chained += chain_records(head, epoch, encode_decision(decision))
        head = Head(seq=chained[-1].seq, hash=chained[-1].hash)
    return chained


def test_each_hash_covers_the_record_and_the_hash_before_it() -> None:
    previous = hashlib.sha256(f"rc journal {JOURNAL_ID}".encode()).hexdigest()
    for record in records():
        content = [record.seq, record.epoch, record.at, record.kind, record.schema, record.body, record.cause]
        content += [record.command, record.events, record.state_digest]
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        previous = hashlib.sha256((previous + text).encode()).hexdigest()
        assert record.hash == previous


def test_following_ends_at_the_head_with_nothing_due() -> None:
    position = Position.start(JOURNAL_ID)
    due = []
    for record in records():
        position = follow_chain("j", position, record)
        due.append((position.due, position.whole_seq))
    assert due == [(0, 1), (1, 1), (0, 3), (0, 4)]
    assert position.head == Head(seq=4, hash=records()[-1].hash)


def test_a_chain_of_another_journal_does_not_fit() -> None:
    with pytest.raises(JournalCorrupt, match="record 1 does not match its hash"):
        follow_chain("j", Position.start("another"), records()[0])


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (admit(1).events[0], ("r1", None, "http://127.0.0.1:8000", 3)),
        (
            RequestUpdate(at=1.0, update="u", target=4, identity=IDENTITY, path="one_phase", engines=("e",)),
            (None, "u", None, 4),
        ),
        (Drain(at=1.0, update="u", engine="e", active=0), (None, "u", "e", None)),
        (
            BeginUpdate(
                at=1.0, update="u", engine="e", target=4, base=3, evidence=PreflightReport(observed=Observation())
            ),
            (None, "u", "e", 4),
        ),
        (Committed(at=1.0, update="u", version=4, identity=IDENTITY, engines=("e",)), (None, "u", None, 4)),
        (Tainted(at=1.0, engine="e", reason="r"), (None, None, "e", None)),
    ],
)
def test_ids_are_pulled_out_of_events(event: Event, expected: tuple[object, ...]) -> None:
    ids = ids_of(event)
    assert (ids.rollout, ids.update, ids.engine, ids.version) == expected


def test_a_decision_has_events_and_a_digest_or_none_for_each() -> None:
    command = StartUpdate(at=1.0, update="u", identity=IDENTITY, path="adopt")
    with pytest.raises(ValueError, match="at least one event"):
        Decision(command=command, events=(), digests=())
    with pytest.raises(ValueError, match="one digest or None for each"):
        Decision(command=command, events=admit().events, digests=())


def test_every_kind_of_event_is_named_as_users_see_it() -> None:
    assert all(kind == kind.lower() and kind.replace("_", "").isalpha() for kind in EVENT_TYPES)


def test_an_identity_that_this_rc_refuses_makes_its_record_unreadable_and_nothing_worse() -> None:
    body = '{"kind":"committed","at":1.0,"update":"u","version":1,"identity":{"run":"","step":1},"engines":["e"]}'
    with pytest.raises(UnreadableEvent, match="needs a run name"):
        decode_event("committed", 1, body)
