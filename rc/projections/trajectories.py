"""Trajectories with their provenance: what was sampled, by which weights, and how much of that the engine attested."""

from __future__ import annotations

from typing import Literal

import msgspec

from rc.errors import IllegalTransition, UnknownRollout
from rc.events.types import AbortRollout, Admit, Committed, EngineJoined, Event, FinishRollout, Turn
from rc.trajectory_rules import contradiction, fully_attested
from rc.versions import WeightIdentity, version_label

__all__ = ("Trajectory", "TrajectoryFold")


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that has ended.

    Attributes:
        rollout: Its id.
        status: Whether it may be trained on (``finished``) or is kept for audit alone (``aborted``).
        reason: Why it was aborted; None if it finished.
        version: The committed version that it was bound to from its admission to its end.
        label: The same as engines attest it, e.g. ``"rc-7"``.
        identity: What that version was declared to contain.
        update: The update that published it.
        attested: Whether the engine itself said for every sampled token that weights of ``label`` sampled it. False
            means that nobody said so, or, on an aborted rollout, that the engine said otherwise.
        engine, boot, vllm, model, profile: The server process that sampled it, as it was when it joined.
        turns: What was sent and sampled, in order.
        admitted_at, ended_at: Unix seconds.
        admit_seq, end_seq: Where the journal says so.
    """

    rollout: str
    status: Literal["finished", "aborted"]
    reason: str | None
    version: int
    label: str
    identity: WeightIdentity
    update: str
    attested: bool
    engine: str
    boot: str
    vllm: str
    model: str
    profile: str
    turns: tuple[Turn, ...]
    admitted_at: float
    ended_at: float
    admit_seq: int
    end_seq: int


class _Open(msgspec.Struct, frozen=True):
    """An admitted rollout, and whose word it will be taken on."""

    seq: int
    admit: Admit
    engine: EngineJoined
    published: Committed


class TrajectoryFold:
    """Folds a journal, from its first event on, into trajectories; holds no more than the rollouts that are active."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineJoined] = {}
        self._published: Committed | None = None
        self._open: dict[str, _Open] = {}

    @property
    def active(self) -> int:
        """How many rollouts have been admitted and have not ended."""
        return len(self._open)

    def apply(self, record_seq: int, event: Event) -> Trajectory | None:
        """Apply an event; give the trajectory that it ends, if it ends one.

        Raises:
            IllegalTransition, UnknownRollout: The history is not one that a controller can have written.
        """
        match event:
            case EngineJoined():
                self._engines[event.engine] = event
            case Committed():
                self._published = event
            case Admit():
                self._admit(record_seq, event)
            case FinishRollout() | AbortRollout():
                return self._end(record_seq, event)
        return None

    def _admit(self, seq: int, event: Admit) -> None:
        engine, published = self._engines.get(event.engine), self._published
        if engine is None or published is None or published.version != event.version:
            raise IllegalTransition(event.kind, f"not serving {version_label(event.version)}", f"engine {event.engine}")
        self._open[event.rollout] = _Open(seq, event, engine, published)

    def _end(self, seq: int, event: FinishRollout | AbortRollout) -> Trajectory:
        opened = self._open.pop(event.rollout, None)
        if opened is None:
            raise UnknownRollout(event.rollout)
        aborted = isinstance(event, AbortRollout)
        label = version_label(event.version)
        return Trajectory(
            rollout=event.rollout,
            status="aborted" if aborted else "finished",
            reason=event.reason if isinstance(event, AbortRollout) else None,
            version=event.version,
            label=label,
            identity=opened.published.identity,
            update=opened.published.update,
            attested=fully_attested(event.turns) and contradiction(label, event.turns) is None,
            engine=event.engine,
            boot=opened.engine.boot,
            vllm=opened.engine.vllm,
            model=opened.engine.model,
            profile=opened.engine.profile,
            turns=event.turns,
            admitted_at=opened.admit.at,
            ended_at=event.at,
            admit_seq=opened.seq,
            end_seq=seq,
        )
