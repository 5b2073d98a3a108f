"""The lifecycle of an engine: every phase, every event, one table.

Theory of operation
-------------------
An engine is JOINED when a probe has found its process; what it holds is then only its own word, so it serves nothing.
It becomes READY when an update has committed to it. An update walks it through::

    READY ─drain→ DRAINING ─quiesced→ QUIESCED ─begin_update→ UPDATING ─installed→ INVALIDATING
          ─invalidated→ VALIDATING ─validated→ RESUMING ─resumed→ READY

and each step is taken on evidence that the previous one held. ``begin_update`` is the point of no return. Before it,
and after it only with proof that nothing was sent, ``update_abandoned`` leads back through RESUMING to where the
engine came from. After it, anything that evidence cannot clear is ``tainted``: TAINTED has one way out, the end of
that process.

Rollouts are admitted in READY only. From QUIESCED to VALIDATING there are none, which is what makes mutation safe;
where an update is abandoned while draining, the rollouts that it found go on, so they may still end in RESUMING. An
event that is not in the row of a phase is illegal there: `next_phase` raises `IllegalTransition` and nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from rc.errors import IllegalTransition

__all__ = ("HOME", "IN_FLIGHT", "MUTATED", "TRANSITIONS", "Home", "Phase", "next_phase")


class Phase(Enum):
    """Where an engine is in its lifecycle."""

    ABSENT = "absent"
    JOINED = "joined"
    READY = "ready"
    DRAINING = "draining"
    QUIESCED = "quiesced"
    UPDATING = "updating"
    INVALIDATING = "invalidating"
    VALIDATING = "validating"
    RESUMING = "resuming"
    TAINTED = "tainted"


class Home(Enum):
    """A target that depends on the engine: READY if it holds a validated version, else JOINED."""

    HOME = "home"


HOME: Final = Home.HOME

TRANSITIONS: Final[Mapping[Phase, Mapping[str, Phase | Home]]] = MappingProxyType(
    {
        Phase.ABSENT: {
            "engine_joined": Phase.JOINED,
        },
        Phase.JOINED: {
            "drain": Phase.DRAINING,
            "engine_lost": Phase.ABSENT,
            "tainted": Phase.TAINTED,
        },
        Phase.READY: {
            "admit": Phase.READY,
            "finish_rollout": Phase.READY,
            "abort_rollout": Phase.READY,
            "drain": Phase.DRAINING,
            "engine_lost": Phase.ABSENT,
            "tainted": Phase.TAINTED,
        },
        Phase.DRAINING: {
            "finish_rollout": Phase.DRAINING,
            "abort_rollout": Phase.DRAINING,
            "quiesced": Phase.QUIESCED,
            "update_abandoned": Phase.RESUMING,
            "engine_lost": Phase.ABSENT,
            "tainted": Phase.TAINTED,
        },
        Phase.QUIESCED: {
            "begin_update": Phase.UPDATING,
            "update_abandoned": Phase.RESUMING,
            "engine_lost": Phase.ABSENT,
            "tainted": Phase.TAINTED,
        },
        Phase.UPDATING: {
            "installed": Phase.INVALIDATING,
            "update_abandoned": Phase.RESUMING,
            "tainted": Phase.TAINTED,
        },
        Phase.INVALIDATING: {
            "invalidated": Phase.VALIDATING,
            "tainted": Phase.TAINTED,
        },
        Phase.VALIDATING: {
            "validated": Phase.RESUMING,
            "tainted": Phase.TAINTED,
        },
        Phase.RESUMING: {
            "finish_rollout": Phase.RESUMING,
            "abort_rollout": Phase.RESUMING,
            "resumed": HOME,
            "engine_lost": Phase.ABSENT,
            "tainted": Phase.TAINTED,
        },
        Phase.TAINTED: {
            "finish_rollout": Phase.TAINTED,
            "abort_rollout": Phase.TAINTED,
            "engine_lost": Phase.ABSENT,
        },
    }
)

IN_FLIGHT: Final = frozenset(
    {Phase.DRAINING, Phase.QUIESCED, Phase.UPDATING, Phase.INVALIDATING, Phase.VALIDATING, Phase.RESUMING}
)
"""Phases with an effect under way: what a crash leaves in doubt."""

MUTATED: Final = frozenset({Phase.UPDATING, Phase.INVALIDATING, Phase.VALIDATING})
"""Phases in which the engine's weights may not be the version it served before."""


def next_phase(engine: str, phase: Phase, kind: str, *, holds_version: bool) -> Phase:
    """Look up the phase that an event leads to.

    Args:
        engine: Name of the engine, for the error.
        phase: Where the engine is.
        kind: The event's kind.
        holds_version: Whether the engine holds a validated version; decides what HOME means.

    Raises:
        IllegalTransition: If the table has no such cell.
    """
    target = TRANSITIONS[phase].get(kind)
    if target is None:
        raise IllegalTransition(kind, phase.name, f"engine {engine}")
    if isinstance(target, Home):
        return Phase.READY if holds_version else Phase.JOINED
    return target
