"""Judge evidence: does what an engine showed prove the step that was asked of it?

A report proves a step only if the engine's own attestation, read after the action, agrees: same process (boot),
expected label, expected pause state. Anything else takes the safest way out that the phase allows: nothing mutated
yet, so the update is abandoned; or something may have, so the engine is tainted.
"""

from __future__ import annotations

from rc.commands import ReportEvidence
from rc.errors import IllegalTransition
from rc.events import types as events
from rc.events.types import Event
from rc.evidence import (
    CacheReport,
    Evidence,
    InstallReport,
    LookReport,
    Observation,
    PauseReport,
    PreflightReport,
    ResumeReport,
    ValidationReport,
)
from rc.lifecycle import MUTATED, Phase
from rc.projections.control import ControlState, Update
from rc.projections.engines import EngineState
from rc.versions import version_label

__all__ = ("judge", "lose_engine", "reconcile", "taint")


def judge(state: ControlState, command: ReportEvidence) -> tuple[Event, ...]:
    """Turn a report about an engine into the events that it proves.

    Raises:
        IllegalTransition: If the engine's phase does not call for this kind of report.
    """
    engine, evidence, at = state.engine(command.engine), command.evidence, command.at
    match engine.phase, evidence:
        case ((Phase.DRAINING | Phase.QUIESCED | Phase.UPDATING), LookReport()) if engine.in_doubt:
            return reconcile(state, engine, at, evidence.observed)
        case Phase.DRAINING, PauseReport() if engine.active == 0 and not engine.in_doubt:
            return _judge_pause(state, engine, at, evidence)
        case Phase.QUIESCED, PreflightReport() if not engine.in_doubt:
            return _judge_preflight(state, engine, at, evidence)
        case Phase.UPDATING, InstallReport() if not engine.in_doubt:
            return _judge_install(state, engine, at, evidence)
        case Phase.INVALIDATING, CacheReport():
            return _judge_caches(state, engine, at, evidence)
        case Phase.VALIDATING, ValidationReport():
            return _judge_validation(state, engine, at, evidence)
        case Phase.RESUMING, ResumeReport():
            return _judge_resume(state, engine, at, evidence)
    doubt = " and in doubt" if engine.in_doubt else ""
    busy = f" with {engine.active} active rollouts" if engine.active else ""
    raise IllegalTransition(type(evidence).__name__, f"{engine.phase.name}{doubt}{busy}", f"engine {engine.engine}")


def _mismatch(engine: EngineState, observed: Observation, *, label: str, paused: bool) -> str | None:
    """Say how the engine's attestation differs from what it must be, or None if it does not."""
    if observed.boot is None or observed.label is None or observed.paused is None:
        return f"could not be read: {observed.problem or 'no reason given'}"
    if observed.boot != engine.boot:
        return "is another server process than before"
    if observed.label != label:
        return f"attests {observed.label!r}, not {label!r}"
    if observed.paused != paused:
        return "is paused" if observed.paused else "is not paused"
    return None


def _current(state: ControlState) -> Update:
    if state.update is None:
        raise IllegalTransition("evidence", "not in progress", "the update that it is about")
    return state.update


def _abandon_or_taint(
    state: ControlState, engine: EngineState, at: float, reason: str, evidence: Evidence
) -> tuple[Event, ...]:
    """Nothing of ours has mutated: give the update up, unless the engine shows that somebody else touched it."""
    observed = evidence.observed
    if observed.boot is not None and observed.boot != engine.boot:
        return lose_engine(state, engine, at, "its server process was restarted")
    if _relabelled(engine, observed):
        return taint(state, engine, at, f"attests {observed.label!r} where rc left {engine.label!r}", evidence)
    return _abandon(state, engine, at, reason, evidence)


def _relabelled(engine: EngineState, observed: Observation) -> bool:
    """Whether this very process attests a label that rc did not leave there."""
    return observed.label is not None and observed.boot in (None, engine.boot) and observed.label != engine.label


def _abandon(state: ControlState, engine: EngineState, at: float, reason: str, evidence: Evidence) -> tuple[Event, ...]:
    """Give the update up for all of its members, or, where another one may have mutated already, this engine."""
    update = _current(state)
    if not _others_untouched(state, update, engine):
        return taint(state, engine, at, f"{reason}, when other members had gone on to {update.update}", evidence)
    return (events.UpdateAbandoned(at=at, update=update.update, reason=reason, evidence=evidence),)


def _others_untouched(state: ControlState, update: Update, engine: EngineState) -> bool:
    others = (state.engine(name) for name in update.engines if name != engine.engine)
    return all(other.phase in (Phase.DRAINING, Phase.QUIESCED) for other in others)


def _judge_pause(state: ControlState, engine: EngineState, at: float, report: PauseReport) -> tuple[Event, ...]:
    wrong = report.problem or _mismatch(engine, report.observed, label=engine.label, paused=True)
    if wrong is not None:
        return _abandon_or_taint(state, engine, at, f"could not pause: {wrong}", report)
    return (events.Quiesced(at=at, update=_current(state).update, engine=engine.engine, evidence=report),)


def _judge_preflight(state: ControlState, engine: EngineState, at: float, report: PreflightReport) -> tuple[Event, ...]:
    wrong = report.problem or _mismatch(engine, report.observed, label=engine.label, paused=True)
    if wrong is not None:
        return _abandon_or_taint(state, engine, at, f"preflight: {wrong}", report)
    update = _current(state)
    begun = events.BeginUpdate(
        at=at,
        update=update.update,
        engine=engine.engine,
        base=engine.version,
        target=update.target,
        evidence=report,
    )
    return (begun,)


def _judge_install(state: ControlState, engine: EngineState, at: float, report: InstallReport) -> tuple[Event, ...]:
    update = _current(state)
    if report.mutation == "none":
        wrong = _mismatch(engine, report.observed, label=engine.label, paused=True)
        if wrong is None:
            return _abandon(state, engine, at, f"nothing was sent: {report.problem or 'no reason given'}", report)
        return taint(state, engine, at, f"nothing was sent, but it {wrong}", report)
    wrong = _mismatch(engine, report.observed, label=version_label(update.target), paused=True)
    if wrong is None:
        return _installed(update, engine, at, report)
    return taint(state, engine, at, f"install: {report.problem or wrong}", report)


def _installed(
    update: Update, engine: EngineState, at: float, evidence: InstallReport | LookReport
) -> tuple[Event, ...]:
    installed = events.Installed(
        at=at, update=update.update, engine=engine.engine, target=update.target, evidence=evidence
    )
    return (installed,)


def _judge_caches(state: ControlState, engine: EngineState, at: float, report: CacheReport) -> tuple[Event, ...]:
    wrong = report.problem or _mismatch(engine, report.observed, label=engine.label, paused=True)
    if wrong is None and not report.complete:
        wrong = "a cache was not reset"
    if wrong is not None:
        return taint(state, engine, at, f"cache reset: {wrong}", report)
    return (events.Invalidated(at=at, update=_current(state).update, engine=engine.engine, evidence=report),)


def _judge_validation(
    state: ControlState, engine: EngineState, at: float, report: ValidationReport
) -> tuple[Event, ...]:
    wrong = report.problem or _mismatch(engine, report.observed, label=engine.label, paused=True)
    if wrong is None and not report.checks:
        wrong = "no check was made"
    if wrong is not None:
        return taint(state, engine, at, f"validation: {wrong}", report)
    return (events.Validated(at=at, update=_current(state).update, engine=engine.engine, evidence=report),)


def _judge_resume(state: ControlState, engine: EngineState, at: float, report: ResumeReport) -> tuple[Event, ...]:
    wrong = _mismatch(engine, report.observed, label=engine.label, paused=False)
    update = state.update
    if wrong is not None:
        reason = f"resume: {report.problem or wrong}"
        if update is not None or _relabelled(engine, report.observed):
            return taint(state, engine, at, reason, report)
        return lose_engine(state, engine, at, reason)
    resumed = events.Resumed(at=at, update=engine.update or "", engine=engine.engine, evidence=report)
    if update is None or not _all_others_ready(state, update, engine):
        return (resumed,)
    return (resumed, _committed(update, at, update.engines))


def _all_others_ready(state: ControlState, update: Update, engine: EngineState) -> bool:
    others = (state.engine(name) for name in update.engines if name != engine.engine)
    return all(other.phase is Phase.READY and other.version == update.target for other in others)


def reconcile(state: ControlState, engine: EngineState, at: float, observed: Observation) -> tuple[Event, ...]:
    """Settle what a dead controller left in doubt, by what the engine shows now.

    Nothing mutated: the update is abandoned. Provably complete (vLLM writes the label after every worker has finished):
    the update goes on from there. Neither can be shown: tainted. Phases whose effect may be repeated yield nothing.
    """
    look = LookReport(observed=observed)
    if engine.phase in (Phase.DRAINING, Phase.QUIESCED):
        reason = "its controller ended before weights were touched"
        return _abandon_or_taint(state, engine, at, reason, look)
    if engine.phase is Phase.UPDATING:
        update = _current(state)
        wrong = _mismatch(engine, observed, label=version_label(update.target), paused=True)
        if wrong is None:
            return _installed(update, engine, at, look)
        if update.path == "adopt" and _mismatch(engine, observed, label=engine.label, paused=True) is None:
            return _abandon(state, engine, at, "its controller ended before the engine was labelled", look)
        return taint(
            state, engine, at, f"its controller ended while weights were being installed, and it {wrong}", look
        )
    if _relabelled(engine, observed):  # repeating the effect would put foreign weights into service
        return taint(state, engine, at, f"attests {observed.label!r} where rc left {engine.label!r}", look)
    return ()


def taint(
    state: ControlState, engine: EngineState, at: float, reason: str, evidence: Evidence | Observation | None = None
) -> tuple[Event, ...]:
    """Take the engine out of service for the rest of its process's life."""
    if isinstance(evidence, Observation):
        evidence = LookReport(observed=evidence)
    update = state.update.update if state.update and engine.engine in state.update.engines else None
    tainted = events.Tainted(at=at, engine=engine.engine, reason=reason, update=update, evidence=evidence)
    return (tainted, *_commit_without(state, engine, at))


def _commit_without(state: ControlState, engine: EngineState, at: float) -> tuple[Event, ...]:
    """Publish, if the engine that leaves was the last that its update waited for."""
    update = state.update
    if update is None or engine.engine not in update.engines or not _all_others_ready(state, update, engine):
        return ()
    left = tuple(name for name in update.engines if name != engine.engine)
    return (_committed(update, at, left),) if left else ()


def _committed(update: Update, at: float, members: tuple[str, ...]) -> events.Committed:
    return events.Committed(
        at=at, update=update.update, version=update.target, identity=update.identity, engines=members
    )


def lose_engine(
    state: ControlState, engine: EngineState, at: float, reason: str, *, gone: bool = False
) -> tuple[Event, ...]:
    """Record that the engine's process is no longer there.

    Its rollouts end. An update in which nothing has mutated is abandoned; in one where something may have, the engine
    is tainted, and leaves only once its process is known to be another (``gone``). An update that has mutated other
    members goes on without it.
    """
    if engine.phase is Phase.ABSENT:
        return ()
    mutating = engine.phase in MUTATED or (engine.phase is Phase.RESUMING and state.update is not None)
    lost = events.EngineLost(at=at, engine=engine.engine, boot=engine.boot, reason=reason)
    if mutating:
        tainted = taint(state, engine, at, f"lost in mid-update: {reason}")
        return (*tainted, lost) if gone else tainted
    ended: list[Event] = [
        events.AbortRollout(
            at=at,
            rollout=rollout.rollout,
            engine=rollout.engine,
            version=rollout.version,
            reason=f"engine lost: {reason}",
        )
        for _, rollout in sorted(state.rollouts.active.items())
        if rollout.engine == engine.engine
    ]
    if engine.phase is Phase.TAINTED:
        return (*ended, lost) if gone else tuple(ended)
    if engine.phase in (Phase.DRAINING, Phase.QUIESCED) and _others_untouched(state, _current(state), engine):
        ended.append(events.UpdateAbandoned(at=at, update=_current(state).update, reason=f"engine lost: {reason}"))
    return (*ended, lost, *_commit_without(state, engine, at))
