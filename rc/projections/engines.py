"""What each engine is known to be, folded from its events by the lifecycle table."""

from __future__ import annotations

import msgspec

from rc.events.types import (
    AbortRollout,
    Admit,
    BeginUpdate,
    Drain,
    EngineJoined,
    EngineLost,
    FinishRollout,
    Installed,
    Invalidated,
    Quiesced,
    Resumed,
    Tainted,
    UpdateAbandoned,
    Validated,
)
from rc.lifecycle import Phase, next_phase
from rc.versions import version_label

__all__ = ("EngineEvent", "EngineState", "advance")

EngineEvent = (
    EngineJoined
    | EngineLost
    | Admit
    | FinishRollout
    | AbortRollout
    | Drain
    | Quiesced
    | BeginUpdate
    | Installed
    | Invalidated
    | Validated
    | Resumed
    | UpdateAbandoned
    | Tainted
)
"""Events that move an engine. `UpdateAbandoned` moves every engine of its update."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        engine: Its name, which is its URL unless the user gave another.
        phase: Where it is in the lifecycle.
        boot: Identifies the server process.
        label: The version label it should attest now.
        version: The version whose weights it holds by evidence; None while that is unproven.
        base: The version it held when the current mutation began.
        update: The update that it is taking part in, until it is READY or JOINED again.
        active: Rollouts admitted to it that have not ended.
        in_doubt: A controller died or was replaced with an effect under way; only evidence clears this.
        taint: Why it is TAINTED.
        tainted_boots: Processes of this engine that were tainted; none of them serves again.
        manifest_digest: Digest of the parameters it loads, where known.
    """

    engine: str
    phase: Phase = Phase.ABSENT
    boot: str = ""
    label: str = ""
    version: int | None = None
    base: int | None = None
    update: str | None = None
    active: int = 0
    in_doubt: bool = False
    taint: str | None = None
    tainted_boots: tuple[str, ...] = ()
    profile: str = ""
    vllm: str = ""
    model: str = ""
    max_model_len: int = 0
    manifest_digest: str | None = None


def advance(engine: EngineState, event: EngineEvent) -> EngineState:
    """Apply an event to the engine it concerns.

    Raises:
        IllegalTransition: If the lifecycle table does not allow it.
    """
    phase = next_phase(engine.engine, engine.phase, event.kind, holds_version=engine.version is not None)
    replace = msgspec.structs.replace
    match event:
        case Admit():
            return replace(engine, active=engine.active + 1)
        case FinishRollout() | AbortRollout():
            return replace(engine, active=engine.active - 1)
        case EngineJoined():
            return EngineState(
                engine=event.engine,
                phase=phase,
                tainted_boots=engine.tainted_boots,
                boot=event.boot,
                label=event.label,
                profile=event.profile,
                vllm=event.vllm,
                model=event.model,
                max_model_len=event.max_model_len,
                manifest_digest=event.manifest_digest,
            )
        case EngineLost():
            return EngineState(engine=engine.engine, phase=phase, tainted_boots=engine.tainted_boots)
        case Drain():
            return replace(engine, phase=phase, update=event.update)
        case BeginUpdate():
            return replace(engine, phase=phase, version=None, base=engine.version, in_doubt=False)
        case Installed():
            return replace(engine, phase=phase, label=version_label(event.target), in_doubt=False)
        case UpdateAbandoned() if engine.phase is Phase.UPDATING:
            return replace(engine, phase=phase, version=engine.base, base=None, in_doubt=False)
        case Resumed():
            return replace(engine, phase=phase, update=None, in_doubt=False)
        case Tainted():
            return _taint(engine, phase, event)
        case _:
            return replace(engine, phase=phase, in_doubt=False)


def _taint(engine: EngineState, phase: Phase, event: Tainted) -> EngineState:
    boots = engine.tainted_boots if engine.boot in engine.tainted_boots else (*engine.tainted_boots, engine.boot)
    return msgspec.structs.replace(
        engine,
        phase=phase,
        version=None,
        base=None,
        update=None,
        taint=event.reason,
        tainted_boots=boots,
        in_doubt=False,
    )
