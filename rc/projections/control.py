"""The state that decisions are made from: a fold of every event, in order.

`evolve` is total over legal histories and raises on any other: it is the same function for the live controller, for
replay and for recovery.
"""

from __future__ import annotations

import hashlib
from typing import Final

import immutables
import msgspec

from rc.errors import IllegalTransition
from rc.events.types import (
    AbortRollout,
    Admit,
    BeginUpdate,
    Committed,
    ControllerStarted,
    Drain,
    EngineJoined,
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
from rc.lifecycle import IN_FLIGHT, Phase
from rc.projections import rollouts as rollout_fold
from rc.projections.engines import EngineEvent, EngineState, advance
from rc.projections.rollouts import Rollouts
from rc.versions import WeightIdentity, version_label

__all__ = ("CHECKPOINTS", "ControlState", "Publication", "Update", "evolve", "state_digest")


CHECKPOINTS: Final = frozenset({"controller_started", "committed", "update_abandoned", "tainted"})
"""Kinds of event after which the journal stores the state's digest, for replay to check itself against."""


class Publication(msgspec.Struct, frozen=True, kw_only=True):
    """A committed version and what it is declared to contain."""

    version: int
    identity: WeightIdentity


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """The update in progress. ``engines`` are the members that it has not lost on the way."""

    update: str
    target: int
    identity: WeightIdentity
    path: UpdatePath
    engines: tuple[str, ...]
    requested_at: float
    manifest_digest: str | None = None


class ControlState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the core knows. ``next_version`` is the number that the next commit will carry."""

    controller: str = ""
    epoch: int = 0
    rules: int = 1
    engines: immutables.Map[str, EngineState] = immutables.Map()
    rollouts: Rollouts = Rollouts()
    update: Update | None = None
    published: Publication | None = None
    next_version: int = 0

    def engine(self, name: str) -> EngineState:
        """Give an engine's state; one that never joined is ABSENT."""
        return self.engines.get(name) or EngineState(engine=name)


def evolve(state: ControlState, event: Event) -> ControlState:
    """Apply one event.

    Raises:
        IllegalTransition: If the event is not allowed in this state.
        UnknownRollout: If it ends a rollout that is not active.
    """
    match event:
        case ControllerStarted():
            return _start_controller(state, event)
        case RequestUpdate():
            return _request_update(state, event)
        case Committed():
            return _commit(state, event)
        case UpdateAbandoned():
            return _abandon(state, event)
        case Tainted() | EngineLost():
            return _drop_member(_move(state, event.engine, event), event.engine)
        case Admit():
            return _admit(state, event)
        case FinishRollout() | AbortRollout():
            ended = msgspec.structs.replace(state, rollouts=rollout_fold.end(state.rollouts, event))
            return _move(ended, event.engine, event)
        case EngineJoined():
            return _move(state, event.engine, event)
        case Resumed():
            return _resume(state, event)
        case _:
            return _step(state, event)


def _move(state: ControlState, name: str, event: EngineEvent) -> ControlState:
    engine = advance(state.engine(name), event)
    return msgspec.structs.replace(state, engines=state.engines.set(name, engine))


def _start_controller(state: ControlState, event: ControllerStarted) -> ControlState:
    if event.epoch <= state.epoch:
        raise IllegalTransition(event.kind, f"at epoch {state.epoch}", f"the journal (offered epoch {event.epoch})")
    engines = state.engines
    for name, engine in state.engines.items():
        if engine.phase in IN_FLIGHT:
            engines = engines.set(name, msgspec.structs.replace(engine, in_doubt=True))
    return msgspec.structs.replace(
        state, controller=event.controller, epoch=event.epoch, rules=event.rules, engines=engines
    )


def _admit(state: ControlState, event: Admit) -> ControlState:
    engine = state.engine(event.engine)
    if state.published is None or not event.version == state.published.version == engine.version:
        raise IllegalTransition(event.kind, f"not serving {version_label(event.version)}", f"engine {event.engine}")
    if event.rollout in state.rollouts.active:
        raise IllegalTransition(event.kind, "already active", f"rollout {event.rollout}")
    moved = _move(state, event.engine, event)
    return msgspec.structs.replace(moved, rollouts=rollout_fold.admit(state.rollouts, event))


def _request_update(state: ControlState, event: RequestUpdate) -> ControlState:
    if state.update is not None:
        raise IllegalTransition(event.kind, "in progress", f"update {state.update.update}")
    if event.target != state.next_version:
        expected, offered = version_label(state.next_version), version_label(event.target)
        raise IllegalTransition(event.kind, f"at {expected} next", f"the journal (offered {offered})")
    if not event.engines:
        raise IllegalTransition(event.kind, "without members", f"update {event.update}")
    update = Update(
        update=event.update,
        target=event.target,
        identity=event.identity,
        path=event.path,
        engines=event.engines,
        requested_at=event.at,
        manifest_digest=event.manifest_digest,
    )
    return msgspec.structs.replace(state, update=update)


def _current_update(state: ControlState, event: Committed | UpdateAbandoned) -> Update:
    if state.update is None or state.update.update != event.update:
        raise IllegalTransition(event.kind, "not in progress", f"update {event.update}")
    return state.update


def _commit(state: ControlState, event: Committed) -> ControlState:
    update = _current_update(state, event)
    if event.version != update.target:
        raise IllegalTransition(event.kind, f"towards {version_label(update.target)}", f"update {event.update}")
    for name in update.engines:
        engine = state.engine(name)
        if engine.phase is not Phase.READY or engine.version != event.version:
            raise IllegalTransition(event.kind, engine.phase.name, f"engine {name}")
    return msgspec.structs.replace(
        state,
        update=None,
        published=Publication(version=event.version, identity=event.identity),
        next_version=event.version + 1,
    )


def _abandon(state: ControlState, event: UpdateAbandoned) -> ControlState:
    update = _current_update(state, event)
    for name in update.engines:
        state = _move(state, name, event)
    return msgspec.structs.replace(state, update=None)


def _step(
    state: ControlState, event: Drain | Quiesced | BeginUpdate | Installed | Invalidated | Validated
) -> ControlState:
    update, active = state.update, state.engine(event.engine).active
    moved = _move(state, event.engine, event)
    if update is None or update.update != event.update or event.engine not in update.engines:
        raise IllegalTransition(event.kind, f"not part of update {event.update}", f"engine {event.engine}")
    if isinstance(event, Quiesced) and active:
        raise IllegalTransition(event.kind, f"running {active} rollouts", f"engine {event.engine}")
    if isinstance(event, BeginUpdate | Installed) and event.target != update.target:
        raise IllegalTransition(event.kind, f"towards {version_label(update.target)}", f"update {event.update}")
    if isinstance(event, Validated):
        engine = msgspec.structs.replace(moved.engine(event.engine), version=update.target, base=None)
        return msgspec.structs.replace(moved, engines=moved.engines.set(event.engine, engine))
    return moved


def _resume(state: ControlState, event: Resumed) -> ControlState:
    # An update that was abandoned is over before its engines have resumed, so the engine is what remembers it.
    known = state.engine(event.engine).update
    moved = _move(state, event.engine, event)
    if event.update != known:
        raise IllegalTransition(event.kind, f"resuming from update {known}", f"engine {event.engine}")
    return moved


def _drop_member(state: ControlState, name: str) -> ControlState:
    update = state.update
    if update is None or name not in update.engines:
        return state
    # The engine may hold bytes of the target, or its label: that number is never used for anything else.
    left = tuple(member for member in update.engines if member != name)
    return msgspec.structs.replace(
        state,
        update=msgspec.structs.replace(update, engines=left) if left else None,
        next_version=max(state.next_version, update.target + 1),
    )


def state_digest(state: ControlState) -> str:
    """SHA-256 over the whole state; equal states have equal digests in every process and Python version."""
    summary = {
        "controller": state.controller,
        "epoch": state.epoch,
        "rules": state.rules,
        "engines": [state.engines[name] for name in sorted(state.engines)],
        "active": len(state.rollouts.active),
        "active_fingerprint": f"{state.rollouts.fingerprint:032x}",
        "finished": state.rollouts.finished,
        "aborted": state.rollouts.aborted,
        "update": state.update,
        "published": state.published,
        "next_version": state.next_version,
    }
    return hashlib.sha256(msgspec.json.encode(summary)).hexdigest()
