"""When each update did what, and how many rollouts each version served: where the time of a training run went."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import immutables
import msgspec

from rc.events.types import (
    AbortRollout,
    Admit,
    BeginUpdate,
    Committed,
    Drain,
    EngineLost,
    Event,
    FinishRollout,
    Installed,
    Invalidated,
    Quiesced,
    RequestUpdate,
    Resumed,
    Tainted,
    UpdateAbandoned,
    UpdatePath,
    Validated,
)
from rc.evidence import InstallReport
from rc.versions import WeightIdentity

__all__ = ("EngineTimes", "Timeline", "UpdateTimes", "VersionCounts", "advance_timeline")

Outcome = Literal["in_progress", "committed", "abandoned", "tainted"]


class EngineTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When one engine took which step of an update, in Unix seconds; None for a step that it did not take.

    Attributes:
        drain_at: Admission ended.
        active_at_drain: Rollouts that were active then.
        paused_at: The pause was asked for; from here on the engine may not generate.
        quiesced_at: It was paused, with no rollout active.
        begin_update_at: Its weights may have been neither version from here on.
        installed_at, invalidated_at, validated_at: As the events of these names say.
        install_took_s: Seconds from the first byte sent to the last answer, as the handler measured.
        resumed_at: It generated again, at the new version or, after an abandoned update, at the old one.
        tainted_at: It left the update for good.
    """

    engine: str
    drain_at: float
    active_at_drain: int
    paused_at: float | None = None
    quiesced_at: float | None = None
    begin_update_at: float | None = None
    installed_at: float | None = None
    install_took_s: float | None = None
    invalidated_at: float | None = None
    validated_at: float | None = None
    resumed_at: float | None = None
    tainted_at: float | None = None

    @property
    def drain_s(self) -> float | None:
        """From the end of admission until the pause was asked for: how long the active rollouts took to end."""
        return None if self.paused_at is None else self.paused_at - self.drain_at

    @property
    def gap_s(self) -> float | None:
        """From then until it generated again: how long the engine could not serve."""
        return None if self.paused_at is None or self.resumed_at is None else self.resumed_at - self.paused_at

    @property
    def install_s(self) -> float | None:
        """How long sending and applying the weights took, within the gap."""
        if self.install_took_s is not None or self.installed_at is None or self.begin_update_at is None:
            return self.install_took_s
        return self.installed_at - self.begin_update_at


class UpdateTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One update.

    Attributes:
        number: Its place in the order of requests, from 0.
        members: Engines that it has not lost on the way.
        engines: What each engine did in it, those that it lost included.
        outcome: How it ended: ``tainted`` where its last member was.
        ended_at: When, in Unix seconds; None while it is in progress.
        reason: Why it did not end in a commit.
    """

    number: int
    update: str
    target: int
    identity: WeightIdentity
    path: UpdatePath
    requested_at: float
    members: tuple[str, ...]
    engines: immutables.Map[str, EngineTimes] = immutables.Map()
    outcome: Outcome = "in_progress"
    ended_at: float | None = None
    reason: str | None = None

    @property
    def active_at_drain(self) -> int:
        """Rollouts that were active when admission ended, on all members."""
        return sum(times.active_at_drain for times in self.engines.values())

    @property
    def drain_s(self) -> float | None:
        """The longest drain of a member."""
        return _longest(times.drain_s for times in self.engines.values())

    @property
    def gap_s(self) -> float | None:
        """The longest gap of a member."""
        return _longest(times.gap_s for times in self.engines.values())

    @property
    def install_s(self) -> float | None:
        """The longest install of a member."""
        return _longest(times.install_s for times in self.engines.values())


def _longest(durations: Iterable[float | None]) -> float | None:
    return max((duration for duration in durations if duration is not None), default=None)


class VersionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What one version served. ``tokens`` counts those of finished rollouts."""

    version: int
    admitted: int = 0
    finished: int = 0
    aborted: int = 0
    tokens: int = 0


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """All updates by id, and all versions by number. An event costs the same however many there are.

    ``latest`` is the update that was requested last.
    """

    latest: str | None = None
    by_update: immutables.Map[str, UpdateTimes] = immutables.Map()
    by_version: immutables.Map[int, VersionCounts] = immutables.Map()

    @property
    def updates(self) -> tuple[UpdateTimes, ...]:
        """Updates in the order in which they were requested."""
        return tuple(sorted(self.by_update.values(), key=lambda times: times.number))

    @property
    def versions(self) -> tuple[VersionCounts, ...]:
        """Versions that served rollouts, in order."""
        return tuple(self.by_version[version] for version in sorted(self.by_version))


def advance_timeline(timeline: Timeline, event: Event) -> Timeline:
    """Apply an event. Steps of an update that was requested before the first event applied are left out."""
    match event:
        case RequestUpdate():
            return _request(timeline, event)
        case Admit() | FinishRollout() | AbortRollout():
            return _count(timeline, event)
        case Drain():
            times = EngineTimes(engine=event.engine, drain_at=event.at, active_at_drain=event.active)
            return _put_engine(timeline, event.update, times)
        case Quiesced():
            paused_at = event.at - event.evidence.took_s
            return _step(timeline, event, paused_at=paused_at, quiesced_at=event.at)
        case Installed():
            took_s = event.evidence.took_s if isinstance(event.evidence, InstallReport) else None
            return _step(timeline, event, installed_at=event.at, install_took_s=took_s)
        case BeginUpdate() | Invalidated() | Validated() | Resumed():
            return _step(timeline, event, **{f"{event.kind}_at": event.at})
        case Committed():
            return _end(timeline, event.update, outcome="committed", ended_at=event.at)
        case UpdateAbandoned():
            return _end(timeline, event.update, outcome="abandoned", ended_at=event.at, reason=event.reason)
        case Tainted() | EngineLost():
            return _lose(timeline, event)
        case _:
            return timeline


def _request(timeline: Timeline, event: RequestUpdate) -> Timeline:
    times = UpdateTimes(
        number=len(timeline.by_update),
        update=event.update,
        target=event.target,
        identity=event.identity,
        path=event.path,
        requested_at=event.at,
        members=event.engines,
    )
    return msgspec.structs.replace(_put(timeline, times), latest=event.update)


def _put(timeline: Timeline, times: UpdateTimes) -> Timeline:
    return msgspec.structs.replace(timeline, by_update=timeline.by_update.set(times.update, times))


def _put_engine(timeline: Timeline, update: str, times: EngineTimes) -> Timeline:
    known = timeline.by_update.get(update)
    if known is None:
        return timeline
    return _put(timeline, msgspec.structs.replace(known, engines=known.engines.set(times.engine, times)))


def _step(
    timeline: Timeline, event: Quiesced | BeginUpdate | Installed | Invalidated | Validated | Resumed, **times: Any
) -> Timeline:
    known = timeline.by_update.get(event.update)
    engine = known.engines.get(event.engine) if known is not None else None
    if engine is None:
        return timeline
    return _put_engine(timeline, event.update, msgspec.structs.replace(engine, **times))


def _end(timeline: Timeline, update: str, **ending: Any) -> Timeline:
    known = timeline.by_update.get(update)
    return timeline if known is None else _put(timeline, msgspec.structs.replace(known, **ending))


def _lose(timeline: Timeline, event: Tainted | EngineLost) -> Timeline:
    known = timeline.by_update.get(timeline.latest or "")
    if known is None or known.outcome != "in_progress" or event.engine not in known.members:
        return timeline
    if event.engine in known.engines and isinstance(event, Tainted):
        engine = msgspec.structs.replace(known.engines[event.engine], tainted_at=event.at)
        known = msgspec.structs.replace(known, engines=known.engines.set(event.engine, engine))
    members = tuple(member for member in known.members if member != event.engine)
    known = msgspec.structs.replace(known, members=members)
    if not members:
        known = msgspec.structs.replace(known, outcome="tainted", ended_at=event.at, reason=event.reason)
    return _put(timeline, known)


def _count(timeline: Timeline, event: Admit | FinishRollout | AbortRollout) -> Timeline:
    counts = timeline.by_version.get(event.version) or VersionCounts(version=event.version)
    match event:
        case Admit():
            counts = msgspec.structs.replace(counts, admitted=counts.admitted + 1)
        case FinishRollout():
            tokens = sum(len(turn.token_ids) for turn in event.turns)
            counts = msgspec.structs.replace(counts, finished=counts.finished + 1, tokens=counts.tokens + tokens)
        case AbortRollout():
            counts = msgspec.structs.replace(counts, aborted=counts.aborted + 1)
    return msgspec.structs.replace(timeline, by_version=timeline.by_version.set(event.version, counts))
