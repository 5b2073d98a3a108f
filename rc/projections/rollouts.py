"""Rollouts that are active now, and how many have ended."""

from __future__ import annotations

import hashlib

import immutables
import msgspec

from rc.errors import IllegalTransition, UnknownRollout
from rc.events.types import AbortRollout, Admit, FinishRollout
from rc.versions import version_label

__all__ = ("ActiveRollout", "Rollouts", "admit", "end")


class ActiveRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout between `admit` and its end. ``lease_until`` is in Unix seconds, as admitted."""

    rollout: str
    engine: str
    version: int
    admitted_at: float
    lease_until: float


class Rollouts(msgspec.Struct, frozen=True, kw_only=True):
    """All active rollouts in a persistent map: one event costs the same whether ten are active or 100,000.

    ``fingerprint`` is the sum, modulo 2**128, of a hash of each active rollout. It stands for the whole map in a state
    digest and is kept up to date with one hash an event.
    """

    active: immutables.Map[str, ActiveRollout] = immutables.Map()
    fingerprint: int = 0
    finished: int = 0
    aborted: int = 0


_MODULUS = 2**128


def _fingerprint(rollout: ActiveRollout) -> int:
    return int.from_bytes(hashlib.sha256(msgspec.json.encode(rollout)).digest()[:16], "big")


def admit(rollouts: Rollouts, event: Admit) -> Rollouts:
    """Add the admitted rollout."""
    rollout = ActiveRollout(
        rollout=event.rollout,
        engine=event.engine,
        version=event.version,
        admitted_at=event.at,
        lease_until=event.at + event.lease_s,
    )
    return msgspec.structs.replace(
        rollouts,
        active=rollouts.active.set(event.rollout, rollout),
        fingerprint=(rollouts.fingerprint + _fingerprint(rollout)) % _MODULUS,
    )


def end(rollouts: Rollouts, event: FinishRollout | AbortRollout) -> Rollouts:
    """Remove the rollout and count how it ended.

    Raises:
        UnknownRollout: If it is not active.
        IllegalTransition: If it is bound to another engine or version than the event says.
    """
    rollout = rollouts.active.get(event.rollout)
    if rollout is None:
        raise UnknownRollout(event.rollout)
    if (event.engine, event.version) != (rollout.engine, rollout.version):
        bound = f"bound to {version_label(rollout.version)} on engine {rollout.engine}"
        raise IllegalTransition(event.kind, bound, f"rollout {event.rollout}")
    finished = isinstance(event, FinishRollout)
    return msgspec.structs.replace(
        rollouts,
        active=rollouts.active.delete(event.rollout),
        fingerprint=(rollouts.fingerprint - _fingerprint(rollout)) % _MODULUS,
        finished=rollouts.finished + finished,
        aborted=rollouts.aborted + (not finished),
    )
