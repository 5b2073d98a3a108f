"""What is written can be read for ever, and reading gives back exactly what was decided on."""

from __future__ import annotations

import math
from typing import Any, cast, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rc.commands import AbortRollouts, AdmitRollout, Command, EndRollout
from rc.errors import CallerError, JournalError
from rc.events import types as events
from rc.events.codec import (
    UPCASTERS,
    UnreadableEvent,
    UnrecordableCommand,
    as_recorded,
    decode_command,
    decode_event,
    encode_command,
    encode_event,
)
from rc.events.types import EVENT_TYPES, Drain, Event, Span, Turn, kind_of
from rc.evidence import Evidence, Observation
from rc.versions import WeightIdentity
from tests.core.samples import COMMANDS, EVENTS


def test_there_is_a_sample_of_every_event_and_every_command() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert {type(command) for command in COMMANDS} == set(get_args(Command))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: str(event.kind))
def test_an_event_reads_back_equal_and_writes_back_the_same_bytes(event: Event) -> None:
    body = encode_event(event)
    again = decode_event(event.kind, event.schema, body)
    assert again == event
    assert encode_event(again) == body


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_reads_back_equal_and_writes_back_the_same_bytes(command: Command) -> None:
    body = encode_command(command)
    assert decode_command(body) == command
    assert encode_command(decode_command(body)) == body


def test_the_kinds_are_the_names_that_users_see() -> None:
    assert set(EVENT_TYPES) == {
        *("admit", "finish_rollout", "abort_rollout"),
        *("request_update", "drain", "quiesced", "begin_update", "installed", "invalidated", "validated", "resumed"),
        *("committed", "update_abandoned", "tainted", "engine_joined", "engine_lost", "controller_started"),
    }
    assert all(kind_of(event_type) == kind for kind, event_type in EVENT_TYPES.items())


@pytest.mark.parametrize("event_type", get_args(Event))
def test_an_event_is_frozen_and_keyword_only_and_tagged_with_its_kind(event_type: type[Event]) -> None:
    config = event_type.__struct_config__
    assert config.frozen
    with pytest.raises(TypeError, match="positional"):
        cast(Any, event_type)(1.0)
    assert config.tag_field == "kind"
    assert not config.array_like, "positions in a stored array could never change again"


# --------------------------------------------------------------------------------------------- reading what is foreign


def test_an_unknown_kind_says_that_it_may_be_of_a_newer_rc() -> None:
    with pytest.raises(UnreadableEvent, match="unknown event kind 'staged': it was written by a newer rc"):
        decode_event("staged", 1, "{}")


def test_a_newer_schema_asks_for_an_upgrade() -> None:
    with pytest.raises(UnreadableEvent, match=r"drain has schema version 2; this rc reads up to 1\. Upgrade rc"):
        decode_event("drain", 2, "{}")


@pytest.mark.parametrize("body", ["", "{", "[]", '{"kind":"drain"}', '{"kind":"drain","at":"soon"}', '{"kind":"nope"}'])
def test_a_body_that_is_no_such_event_is_named(body: str) -> None:
    with pytest.raises(UnreadableEvent, match="the body of a drain event cannot be read"):
        decode_event("drain", 1, body)


def test_a_body_of_another_kind_is_refused() -> None:
    body = encode_event(EVENTS[0])
    with pytest.raises(UnreadableEvent, match="a drain event's body says it is controller_started"):
        decode_event("drain", 1, body)


def test_a_field_that_this_rc_does_not_know_is_passed_over() -> None:
    body = '{"kind":"drain","at":1.0,"update":"u","engine":"e","active":2,"deadline_s":3.0}'
    assert decode_event("drain", 1, body) == Drain(at=1.0, update="u", engine="e", active=2)


@pytest.mark.parametrize("body", ["", "{}", '{"command":"fly"}', '{"command":"admit_rollout","at":null}'])
def test_a_recorded_command_that_is_none_is_named(body: str) -> None:
    with pytest.raises(UnreadableEvent, match="a recorded command cannot be read"):
        decode_command(body)


def test_what_cannot_be_read_is_the_journals_fault_and_what_cannot_be_recorded_the_callers() -> None:
    assert issubclass(UnreadableEvent, JournalError)
    assert issubclass(UnrecordableCommand, CallerError)


# ----------------------------------------------------------------------------------------------------------- upcasting


def upcast_drain_v1_v2(fields: dict[str, Any]) -> dict[str, Any]:
    """Version 2 calls the count ``running``."""
    fields["running"] = fields.pop("active")
    return fields


def upcast_drain_v2_v3(fields: dict[str, Any]) -> dict[str, Any]:
    """Version 3 calls it ``active`` again."""
    fields["active"] = fields.pop("running") + 100
    return fields


OLD_BODY = '{"kind":"drain","at":1.0,"update":"u","engine":"e","active":2}'


def test_an_old_event_is_brought_up_to_date_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drain, "schema", 3)
    upcasters = {("drain", 1): upcast_drain_v1_v2, ("drain", 2): upcast_drain_v2_v3}
    event = decode_event("drain", 1, OLD_BODY, upcasters=upcasters)
    assert event == Drain(at=1.0, update="u", engine="e", active=102)


def test_a_missing_upcaster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drain, "schema", 3)
    with pytest.raises(UnreadableEvent, match="drain has schema version 2, and nothing converts it to 3"):
        decode_event("drain", 1, OLD_BODY, upcasters={("drain", 1): upcast_drain_v1_v2})


@pytest.mark.parametrize("body", ["{", "[]", '{"kind":"drain","at":1.0}', '{"kind":"admit","at":1.0}'])
def test_an_old_body_that_is_no_such_event_is_named(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(Drain, "schema", 2)
    with pytest.raises(UnreadableEvent, match="the body of a drain event cannot be read"):
        decode_event("drain", 1, body, upcasters={("drain", 1): lambda fields: fields})


def test_every_step_from_the_first_schema_to_the_current_one_has_an_upcaster() -> None:
    steps = {(kind, v) for kind, event_type in EVENT_TYPES.items() for v in range(1, event_type.schema)}
    assert set(UPCASTERS) == steps


# ----------------------------------------------------------------------------------------------------------- recording


def test_a_whole_number_for_a_float_is_decided_on_as_it_will_be_read() -> None:
    given_by_user = AdmitRollout(at=5, rollout="r1", lease_s=600)
    recorded = as_recorded(given_by_user)
    assert isinstance(recorded, AdmitRollout)
    assert (type(recorded.at), type(recorded.lease_s)) == (float, float)
    assert encode_command(recorded) != encode_command(given_by_user), "which is why the raw form is never decided on"


def test_sampling_parameters_are_decided_on_as_they_will_be_read() -> None:
    turn = Turn(prompt_token_ids=(1,), token_ids=(2,), sampling={"logit_bias": {7: 1.0}, "stop": ("a", "b")})
    recorded = as_recorded(EndRollout(at=5.0, rollout="r1", turns=(turn,)))
    assert isinstance(recorded, EndRollout)
    assert recorded.turns[0].sampling == {"logit_bias": {"7": 1.0}, "stop": ["a", "b"]}


@pytest.mark.parametrize(
    "command",
    [
        AdmitRollout(at=5.0, rollout="r1", lease_s=math.inf),
        AdmitRollout(at=math.nan, rollout="r1", lease_s=1.0),
        AdmitRollout(at=5.0, rollout="\ud800", lease_s=1.0),
        AbortRollouts(
            at=5.0,
            rollouts=("r1",),
            reason="cancelled",
            turns=(Turn(prompt_token_ids=(1,), token_ids=(2,), logprobs=(math.nan,)),),
        ),
        EndRollout(
            at=5.0, rollout="r1", turns=(Turn(prompt_token_ids=(1,), token_ids=(2,), sampling={"seed": object()}),)
        ),
    ],
    ids=["infinite lease", "no time", "half a character", "no logprob", "an object"],
)
def test_a_command_that_no_journal_can_hold_is_refused_before_it_is_decided(command: Command) -> None:
    with pytest.raises(
        UnrecordableCommand, match=f"no journal can hold this {type(command).__name__}: .* must be finite"
    ):
        as_recorded(command)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=8,
)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**40), 2**40)
turns = st.builds(
    Turn,
    prompt_token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    token_ids=st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    logprobs=st.lists(numbers, max_size=3).map(tuple),
    sampling=st.dictionaries(st.text(), json_values, max_size=3),
    started_at=st.none() | numbers,
)


@given(turns=st.lists(turns, max_size=2), at=numbers)
def test_what_is_recorded_reads_back_the_same_however_often(turns: list[Turn], at: float) -> None:
    try:
        recorded = as_recorded(EndRollout(at=at, rollout="r1", turns=tuple(turns)))
    except UnrecordableCommand:
        return
    body = encode_command(recorded)
    assert encode_command(decode_command(body)) == body
    assert as_recorded(recorded) == recorded


@given(turns=st.lists(turns, max_size=2), at=numbers)
def test_an_event_of_recorded_values_writes_back_the_same_bytes(turns: list[Turn], at: float) -> None:
    try:
        recorded = as_recorded(EndRollout(at=at, rollout="r1", turns=tuple(turns)))
    except UnrecordableCommand:
        return
    assert isinstance(recorded, EndRollout)
    event = events.FinishRollout(at=recorded.at, rollout="r1", engine="e", version=0, turns=recorded.turns)
    body = encode_event(event)
    assert encode_event(decode_event("finish_rollout", 1, body)) == body


STORED: list[type[msgspec.Struct]] = [
    *(*get_args(Event), *get_args(Command), *get_args(Evidence)),
    *(Turn, Span, Observation, WeightIdentity),
]


@pytest.mark.parametrize("stored", STORED)
def test_a_default_is_left_out_also_after_it_was_read(stored: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(stored):
        if field.default is msgspec.NODEFAULT or isinstance(field.default, float):  # a float, once written, stays
            continue
        read = msgspec.json.decode(msgspec.json.encode(field.default), type=type(field.default))
        assert read is field.default, f"{field.name} would be written where it was left out"
