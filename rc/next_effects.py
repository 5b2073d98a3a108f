"""What must be done now: a pure function of the state, so that it says the same after a crash as before it.

Order matters only between an event and its effect: an effect is started after the event that calls for it is durable.
At most one effect per engine is called for at a time. Where a controller died with an effect under way, the state is
in doubt: what can be repeated is repeated, what cannot (pausing towards a mutation, the mutation itself) is looked at
first.
"""

from __future__ import annotations

import msgspec

from rc.events.types import UpdatePath
from rc.lifecycle import Phase
from rc.projections.control import ControlState, Update
from rc.projections.engines import EngineState
from rc.versions import version_label

__all__ = (
    "Effect",
    "InstallWeights",
    "LookAtEngine",
    "PauseEngine",
    "ResetCaches",
    "ResumeEngine",
    "RunPreflight",
    "ValidateEngine",
    "next_effects",
)


class _Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What every effect has: the engine it acts on and the update it serves."""

    engine: str
    update: str | None


class LookAtEngine(_Effect, frozen=True, kw_only=True):
    """Observe, change nothing."""


class PauseEngine(_Effect, frozen=True, kw_only=True):
    """Pause generation; whatever strangers have in flight is aborted."""


class RunPreflight(_Effect, frozen=True, kw_only=True):
    """Check everything that can be checked before weights mutate."""

    target: int
    path: UpdatePath


class InstallWeights(_Effect, frozen=True, kw_only=True):
    """Send and apply the update's weights under ``label``."""

    target: int
    path: UpdatePath

    @property
    def label(self) -> str:
        """The label that the engine must attest afterwards."""
        return version_label(self.target)


class ResetCaches(_Effect, frozen=True, kw_only=True):
    """Reset every cache that may hold values of other weights."""


class ValidateEngine(_Effect, frozen=True, kw_only=True):
    """Check the paused engine at its new version."""

    target: int


class ResumeEngine(_Effect, frozen=True, kw_only=True):
    """Resume generation."""


Effect = LookAtEngine | PauseEngine | RunPreflight | InstallWeights | ResetCaches | ValidateEngine | ResumeEngine


def next_effects(state: ControlState) -> tuple[Effect, ...]:
    """Give the effects that the state calls for, at most one per engine, ordered by engine name."""
    effects = (_next_effect(state.engines[name], state.update) for name in sorted(state.engines))
    return tuple(effect for effect in effects if effect is not None)


def _next_effect(engine: EngineState, update: Update | None) -> Effect | None:
    name, update_id = engine.engine, engine.update
    if engine.in_doubt and engine.phase in (Phase.DRAINING, Phase.QUIESCED, Phase.UPDATING):
        return LookAtEngine(engine=name, update=update_id)
    match engine.phase:
        case Phase.RESUMING:
            return ResumeEngine(engine=name, update=update_id)
        case Phase.INVALIDATING:
            return ResetCaches(engine=name, update=update_id)
        case Phase.DRAINING if engine.active == 0:
            return PauseEngine(engine=name, update=update_id)
    if update is None:
        return None
    match engine.phase:
        case Phase.QUIESCED:
            return RunPreflight(engine=name, update=update_id, target=update.target, path=update.path)
        case Phase.UPDATING:
            return InstallWeights(engine=name, update=update_id, target=update.target, path=update.path)
        case Phase.VALIDATING:
            return ValidateEngine(engine=name, update=update_id, target=update.target)
    return None
