"""Decide: what a command means in a state, as events. Pure: no clock, no I/O, no randomness.

A command that cannot be carried out raises a typed error and yields nothing. Evidence never raises for being bad
news: bad news is an event too (`update_abandoned`, `tainted`, `engine_lost`). What each report must show is in
`rc.judge`.
"""

from __future__ import annotations

import math

from rc.commands import (
    AbandonUpdate,
    AbortRollouts,
    AdmitRollout,
    Command,
    EndRollout,
    JoinEngine,
    LoseEngine,
    ReportEvidence,
    StartController,
    StartUpdate,
)
from rc.errors import (
    EngineLost,
    EngineTainted,
    EngineUnreachable,
    EngineUnsuitable,
    IllegalTransition,
    InvalidTrajectory,
    InvalidWeights,
    NotAdmitted,
    RolloutCoreError,
    UnknownRollout,
    UpdateInProgress,
)
from rc.events import types as events
from rc.events.types import Event
from rc.evidence import LookReport
from rc.judge import judge, lose_engine, reconcile, taint
from rc.lifecycle import IN_FLIGHT, Phase
from rc.projections.control import ControlState
from rc.projections.engines import EngineState
from rc.projections.rollouts import ActiveRollout
from rc.trajectory_rules import check_shape, contradiction, fully_attested
from rc.versions import parse_version_label, version_label

__all__ = ("UNPUBLISHED_LABEL", "decide")

UNPUBLISHED_LABEL = "default"
"""What vLLM attests from its start until somebody labels its weights."""


def decide(state: ControlState, command: Command) -> tuple[Event, ...]:
    """Answer a command with the events that it causes; none if it changes nothing.

    Raises:
        CallerError: If the command cannot be carried out as given.
        EngineError: If the engine that it concerns is not in a condition for it.
    """
    match command:
        case StartController():
            return _start_controller(state, command)
        case JoinEngine():
            return _join_engine(state, command)
        case LoseEngine():
            return lose_engine(state, state.engine(command.engine), command.at, command.reason)
        case AdmitRollout():
            return _admit(state, command)
        case EndRollout():
            return _end_rollout(state, command)
        case AbortRollouts():
            return _abort_rollouts(state, command)
        case StartUpdate():
            return _start_update(state, command)
        case AbandonUpdate():
            return _abandon_update(state, command)
        case ReportEvidence():
            return judge(state, command)


def _start_controller(state: ControlState, command: StartController) -> tuple[Event, ...]:
    if command.epoch <= state.epoch:
        offered = f"the journal (offered epoch {command.epoch})"
        raise IllegalTransition("controller_started", f"at epoch {state.epoch}", offered)
    started = events.ControllerStarted(at=command.at, controller=command.controller, epoch=command.epoch)
    reason = "its controller ended without closing"
    aborted = (_abort(rollout, command.at, reason) for _, rollout in sorted(state.rollouts.active.items()))
    return (started, *aborted)


def _abort(rollout: ActiveRollout, at: float, reason: str, turns: tuple[events.Turn, ...] = ()) -> events.AbortRollout:
    return events.AbortRollout(
        at=at, rollout=rollout.rollout, engine=rollout.engine, version=rollout.version, reason=reason, turns=turns
    )


def _join_engine(state: ControlState, command: JoinEngine) -> tuple[Event, ...]:
    engine, observed = state.engine(command.engine), command.observed
    if observed.boot is None or observed.label is None or observed.paused is None:
        raise EngineUnreachable(f"engine {command.engine} cannot be read: {observed.problem or 'no reason given'}")
    if engine.phase is not Phase.ABSENT and observed.boot == engine.boot:
        return _rejoin(state, engine, command)
    lost = lose_engine(state, engine, command.at, "its server process was restarted", gone=True)
    unsuitable = _unsuitable(state, command, observed.label, paused=observed.paused)
    if unsuitable is not None:
        if lost:
            return lost  # the process that was known has ended, whatever is wrong with the new one: asking again tells
        raise unsuitable
    joined = events.EngineJoined(
        at=command.at,
        engine=command.engine,
        boot=observed.boot,
        label=observed.label,
        profile=command.profile,
        vllm=command.vllm,
        model=command.model,
        max_model_len=command.max_model_len,
        manifest_digest=command.manifest_digest,
    )
    if observed.boot in engine.tainted_boots:
        # Two processes take turns behind one address: what is in doubt about this one stays in doubt.
        tainted = events.Tainted(
            at=command.at,
            engine=command.engine,
            reason="this server process was TAINTED before",
            evidence=LookReport(observed=observed),
        )
        return (*lost, joined, tainted)
    return (*lost, joined)


def _unsuitable(state: ControlState, command: JoinEngine, label: str, *, paused: bool) -> EngineUnsuitable | None:
    version = parse_version_label(label)
    known = version is not None and version < state.next_version
    if label != UNPUBLISHED_LABEL and not known:
        return EngineUnsuitable(
            f"engine {command.engine} attests weight version {label!r}, which this journal never published: another "
            f"controller uses it, or this is not that engine's journal. Open the right journal, or restart the engine"
        )
    if paused:
        return EngineUnsuitable(
            f"engine {command.engine} is paused, and not by this controller. If nobody is updating it, POST /resume "
            f"to it or restart it, then join again"
        )
    return None


def _rejoin(state: ControlState, engine: EngineState, command: JoinEngine) -> tuple[Event, ...]:
    observed = command.observed
    if engine.phase in IN_FLIGHT:
        return reconcile(state, engine, command.at, observed) if engine.in_doubt else ()
    if engine.phase is Phase.TAINTED:
        return ()
    if observed.label != engine.label:
        return taint(state, engine, command.at, f"attests {observed.label!r} where rc left {engine.label!r}", observed)
    if observed.paused:
        return taint(state, engine, command.at, "was paused by somebody else while rc was away", observed)
    return ()


def _admit(state: ControlState, command: AdmitRollout) -> tuple[Event, ...]:
    if command.rollout in state.rollouts.active:
        raise NotAdmitted(f"a rollout {command.rollout} is already active; ids must be unique", transient=False)
    if not (command.lease_s > 0 and math.isfinite(command.lease_s)):
        raise NotAdmitted(f"a lease must be longer than 0 s and end some day, not {command.lease_s}", transient=False)
    if state.published is None:
        raise _no_engine(state)
    version = state.published.version
    serving = [e for e in state.engines.values() if e.phase is Phase.READY and e.version == version]
    if not serving:
        raise _no_engine(state)
    engine = min(serving, key=lambda candidate: (candidate.active, candidate.engine))
    admitted = events.Admit(
        at=command.at, rollout=command.rollout, engine=engine.engine, version=version, lease_s=command.lease_s
    )
    return (admitted,)


def _no_engine(state: ControlState) -> RolloutCoreError:
    engines = [state.engines[name] for name in sorted(state.engines)]
    for engine in engines:
        if engine.phase in IN_FLIGHT:
            return NotAdmitted(f"engine {engine.engine} is {engine.phase.name} in an update", transient=True)
    for engine in engines:
        if engine.phase is Phase.TAINTED:
            return EngineTainted(engine.engine, engine.taint or "reason unknown")
        if engine.phase is Phase.JOINED:
            return NotAdmitted(
                f"engine {engine.engine} holds weights that this journal did not publish (it is new, or was "
                f"restarted); publish with update() before admitting rollouts",
                transient=False,
            )
    return EngineLost("no engine is joined: the server died or was never reached; restart it and join it again")


def _active(state: ControlState, rollout: str) -> ActiveRollout:
    active = state.rollouts.active.get(rollout)
    if active is None:
        raise UnknownRollout(rollout)
    return active


def _end_rollout(state: ControlState, command: EndRollout) -> tuple[Event, ...]:
    rollout = _active(state, command.rollout)
    check_shape(rollout.rollout, command.turns)
    engine = state.engine(rollout.engine)
    wrong = contradiction(version_label(rollout.version), command.turns)
    if wrong is not None:
        aborted = _abort(rollout, command.at, f"version mismatch: {wrong}", command.turns)
        if engine.phase is Phase.TAINTED:
            return (aborted,)
        return (aborted, *taint(state, engine, command.at, f"rollout {rollout.rollout}: {wrong}"))
    if engine.phase is Phase.TAINTED and not fully_attested(command.turns):
        reason = f"its engine is TAINTED ({engine.taint}), and the engine did not attest which weights sampled it"
        return (_abort(rollout, command.at, reason, command.turns),)
    finished = events.FinishRollout(
        at=command.at, rollout=rollout.rollout, engine=rollout.engine, version=rollout.version, turns=command.turns
    )
    return (finished,)


def _abort_rollouts(state: ControlState, command: AbortRollouts) -> tuple[Event, ...]:
    rollouts = [_active(state, rollout) for rollout in dict.fromkeys(command.rollouts)]
    if command.turns and len(rollouts) != 1:
        raise InvalidTrajectory(f"turns belong to one rollout, and {len(rollouts)} are to be aborted with them")
    return tuple(_abort(rollout, command.at, command.reason, command.turns) for rollout in rollouts)


def _start_update(state: ControlState, command: StartUpdate) -> tuple[Event, ...]:
    members = _members(state)
    command.identity.check_follows(state.published.identity if state.published else None)
    for engine in members:
        if command.manifest_digest and engine.manifest_digest not in (None, command.manifest_digest):
            raise InvalidWeights(
                f"the weights' manifest {command.manifest_digest[:12]} is not what engine {engine.engine} loads "
                f"({(engine.manifest_digest or '')[:12]}): names, dtypes or shapes differ"
            )
        if command.path == "adopt" and (state.published is not None or engine.label != UNPUBLISHED_LABEL):
            raise EngineUnsuitable(
                f"engine {engine.engine} has served a published version; only a fresh one is adopted"
            )
    requested = events.RequestUpdate(
        at=command.at,
        update=command.update,
        target=state.next_version,
        identity=command.identity,
        path=command.path,
        engines=tuple(engine.engine for engine in members),
        backend=command.backend,
        manifest_digest=command.manifest_digest,
        nbytes=command.nbytes,
    )
    drains = (
        events.Drain(at=command.at, update=command.update, engine=engine.engine, active=engine.active)
        for engine in members
    )
    return (requested, *drains)


def _members(state: ControlState) -> list[EngineState]:
    if state.update is not None:
        raise UpdateInProgress(state.update.update, version_label(state.update.target))
    members = [state.engines[name] for name in sorted(state.engines) if state.engines[name].phase is not Phase.ABSENT]
    if not members:
        raise EngineLost("no engine is joined: the server died or was never reached; restart it and join it again")
    for engine in members:
        if engine.phase is Phase.TAINTED:
            raise EngineTainted(engine.engine, engine.taint or "reason unknown")
        if engine.phase in IN_FLIGHT:
            raise UpdateInProgress(engine.update or "", version_label(state.next_version))
    return members


def _abandon_update(state: ControlState, command: AbandonUpdate) -> tuple[Event, ...]:
    if state.update is None or state.update.update != command.update:
        raise IllegalTransition("update_abandoned", "not in progress", f"update {command.update}")
    for name in state.update.engines:
        phase = state.engine(name).phase
        if phase not in (Phase.DRAINING, Phase.QUIESCED):
            raise IllegalTransition("update_abandoned", phase.name, f"engine {name}")
    return (events.UpdateAbandoned(at=command.at, update=command.update, reason=command.reason),)
