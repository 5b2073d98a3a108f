"""Decisions to fill journals with. A journal stores what it is given, so these need not make a legal history."""

from __future__ import annotations

import anyio

from rc.commands import AbortRollouts, AdmitRollout, EndRollout
from rc.events.journal import Decision, JournalReader, Record
from rc.events.types import AbortRollout, Admit, Event, FinishRollout, Span, Turn

ENGINE = "http://127.0.0.1:8000"
DIGEST = "d1" * 32
REASON = 'engine lost: 💥 näh\n\x00"quoted"'


def admit(number: int = 1) -> Decision:
    """Admit a rollout: a decision of one event."""
    at, rollout = 1000.0 + number, f"r{number}"
    event = Admit(at=at, rollout=rollout, engine=ENGINE, version=3, lease_s=600.0)
    return Decision(command=AdmitRollout(at=at, rollout=rollout, lease_s=600.0), events=(event,), digests=(None,))


def finish(number: int = 1, *, tokens: int = 4) -> Decision:
    """Finish it: a decision with a trajectory."""
    at, rollout = 1000.5 + number, f"r{number}"
    turn = Turn(
        prompt_token_ids=(1, 2, 3),
        token_ids=tuple(range(tokens)),
        logprobs=tuple(-0.1 * token for token in range(tokens)),
        spans=(Span(label="rc-3", start=0, end=tokens),),
        finish_reason="length",
        sampling={"temperature": 0.7},
    )
    event = FinishRollout(at=at, rollout=rollout, engine=ENGINE, version=3, turns=(turn,))
    return Decision(command=EndRollout(at=at, rollout=rollout, turns=(turn,)), events=(event,), digests=(None,))


def abort_all(*numbers: int) -> Decision:
    """Abort several rollouts: one decision of as many events, the last with a digest."""
    rollouts = tuple(f"r{number}" for number in numbers)
    events: tuple[Event, ...] = tuple(
        AbortRollout(at=2000.25, rollout=rollout, engine=ENGINE, version=3, reason="engine lost: näh\n\x00")
        for rollout in rollouts
    )
    digests = (None,) * (len(events) - 1) + (DIGEST,)
    command = AbortRollouts(at=2000.25, rollouts=rollouts, reason=REASON)
    return Decision(command=command, events=events, digests=digests)


class Tail:
    """Follows a journal in a task of its own. ``enough`` is set once it has ``wanted`` records."""

    def __init__(self, reader: JournalReader, *, wanted: int, after: int = 0) -> None:
        self.seen: list[Record] = []
        self.enough = anyio.Event()
        self._reader = reader
        self._wanted = wanted
        self._after = after

    async def run(self) -> None:
        async for record in self._reader.follow(after=self._after):
            self.seen.append(record)
            if len(self.seen) == self._wanted:
                self.enough.set()


async def read(reader: JournalReader, *, after: int = 0) -> list[Record]:
    """Read what is durable now."""
    return [record async for record in reader.records(after=after)]


def rollouts(records: list[Record]) -> list[str]:
    """Name the rollouts that the records are about."""
    return [str(getattr(record.event, "rollout", "")) for record in records]
