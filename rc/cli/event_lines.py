"""Events as aligned lines for people."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from rc.events import types as events
from rc.events.journal import Record
from rc.events.types import Event, Turn
from rc.versions import version_label

__all__ = ("LEGEND", "event_line")

LEGEND: Final = f"{'seq':>7}  {'time (UTC)':<15}  {'event':<18}  {'of':<24}  what"
"""Heading of the columns that `event_line` prints."""


def event_line(record: Record) -> str:
    """Give one event as one line: position, time of day, kind, the rollout, update or engine it is about, details."""
    event = record.event
    time = datetime.fromtimestamp(record.at, UTC).strftime("%H:%M:%S.%f")
    return f"{record.seq:>7}  {time:<15}  {record.kind:<18}  {_subject(event):<24}  {_details(event)}".rstrip()


def _subject(event: Event) -> str:
    for name in ("rollout", "update", "engine", "controller"):
        value = getattr(event, name, None)
        if value:
            return str(value)
    return ""


def _details(event: Event) -> str:  # noqa: C901 - one case a kind
    match event:
        case events.ControllerStarted():
            return f"epoch {event.epoch}"
        case events.EngineJoined():
            return f"vLLM {event.vllm} attests {event.label!r}, {event.max_model_len} tokens of context"
        case events.Admit():
            return f"{version_label(event.version)} on {event.engine}"
        case events.FinishRollout():
            return f"{version_label(event.version)}, {_tokens(event.turns)}"
        case events.AbortRollout():
            return f"{version_label(event.version)}: {event.reason}"
        case events.RequestUpdate():
            identity = event.identity
            return f"→ {version_label(event.target)} = {identity.run} step {identity.step} ({event.path})"
        case events.Drain():
            return f"{event.active} active on {event.engine}"
        case events.BeginUpdate():
            base = "nothing published" if event.base is None else version_label(event.base)
            return f"{base} → {version_label(event.target)} on {event.engine}"
        case events.Installed():
            return f"{version_label(event.target)} in {event.evidence.took_s * 1000:.0f} ms"
        case events.Quiesced() | events.Invalidated() | events.Resumed():
            return f"in {event.evidence.took_s * 1000:.0f} ms"
        case events.Validated():
            return ", ".join(event.evidence.checks)
        case events.Committed():
            return f"{version_label(event.version)} = {event.identity.run} step {event.identity.step}"
        case _:
            return event.reason


def _tokens(turns: tuple[Turn, ...]) -> str:
    tokens = sum(len(turn.token_ids) for turn in turns)
    return f"{tokens} tokens" if len(turns) == 1 else f"{tokens} tokens in {len(turns)} turns"
