"""Events and commands as JSON text, and older shapes brought up to date.

The journal stores what was written, byte for byte, for ever. Reading goes through upcasters: functions from the JSON
object of one schema version of a kind to the next, named ``upcast_KIND_v1_v2`` and registered in `UPCASTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from rc.commands import Command
from rc.errors import CallerError, InvalidIdentity, JournalError
from rc.events.types import EVENT_TYPES, Event

__all__ = (
    "UPCASTERS",
    "UnreadableEvent",
    "UnrecordableCommand",
    "as_recorded",
    "decode_command",
    "decode_event",
    "encode_command",
    "encode_event",
)

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: Final[Mapping[tuple[str, int], Upcaster]] = MappingProxyType({})
"""``(kind, from version)`` → function to the next version. Empty while every kind is at its first."""

# Digits of a float are kept as written (shortest that round-trips), so encoding what was decoded gives the same bytes.
_encoder = msgspec.json.Encoder()
_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_command_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


_UNREADABLE = (msgspec.MsgspecError, InvalidIdentity)
"""What decoding raises: an identity checks itself when it is built."""


class UnreadableEvent(JournalError):
    """A kind, schema version or body that this rc cannot read."""


class UnrecordableCommand(CallerError):
    """A command with a value that a journal cannot give back: a NaN, an infinite time, a tensor, half a character."""


def as_recorded(command: Command) -> Command:
    """Give the command as the journal will give it back: ``600`` for a float is 600.0, a list of numbers a tuple.

    A live decision is made on this form, never on what the caller built. Replay has only this form, so anything else
    would let the two differ.

    Raises:
        UnrecordableCommand: If a value cannot be recorded; nothing was decided.
    """
    try:
        return _command_decoder.decode(_encoder.encode(command))
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnrecordableCommand(
            f"no journal can hold this {type(command).__name__}: {error}. Numbers must be finite, text well-formed, "
            f"sampling parameters plain JSON values"
        ) from error


def encode_event(event: Event) -> str:
    """Encode an event as JSON text; one that was read back gives the same text again."""
    return _encoder.encode(event).decode()


def decode_event(
    kind: str, schema: int, body: str, *, upcasters: Mapping[tuple[str, int], Upcaster] = UPCASTERS
) -> Event:
    """Decode an event, whatever released schema version it was written in.

    Raises:
        UnreadableEvent: Naming the kind and what is wrong with it.
    """
    event_type = EVENT_TYPES.get(kind)
    if event_type is None:
        raise UnreadableEvent(f"unknown event kind {kind!r}: it was written by a newer rc, or is not an rc event")
    if schema > event_type.schema:
        raise UnreadableEvent(
            f"{kind} has schema version {schema}; this rc reads up to {event_type.schema}. Upgrade rc to read it"
        )
    try:
        if schema < event_type.schema:
            return msgspec.convert(_upcast(kind, schema, event_type.schema, body, upcasters), event_type)
        event = _event_decoder.decode(body)
    except _UNREADABLE as error:
        raise UnreadableEvent(f"the body of a {kind} event cannot be read: {error}") from error
    if event.kind != kind:
        raise UnreadableEvent(f"a {kind} event's body says it is {event.kind}")
    return event


def _upcast(
    kind: str, schema: int, current: int, body: str, upcasters: Mapping[tuple[str, int], Upcaster]
) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    for version in range(schema, current):
        upcaster = upcasters.get((kind, version))
        if upcaster is None:
            raise UnreadableEvent(f"{kind} has schema version {version}, and nothing converts it to {version + 1}")
        fields = upcaster(fields)
    return fields


def encode_command(command: Command) -> str:
    """Encode a command as JSON text."""
    return _encoder.encode(command).decode()


def decode_command(body: str) -> Command:
    """Decode a recorded command.

    Raises:
        UnreadableEvent: If it is not one.
    """
    try:
        return _command_decoder.decode(body)
    except _UNREADABLE as error:
        raise UnreadableEvent(f"a recorded command cannot be read: {error}") from error
