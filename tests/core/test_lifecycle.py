"""The lifecycle table: what mission.md allows, cell by cell, and nothing else."""

from __future__ import annotations

import itertools
from typing import Any, cast, get_args

import msgspec
import pytest

from rc.errors import IllegalTransition
from rc.events import types as events
from rc.events.types import EVENT_TYPES, Event
from rc.evidence import (
    CacheReport,
    InstallReport,
    Observation,
    PauseReport,
    PreflightReport,
    ResumeReport,
    ValidationReport,
)
from rc.lifecycle import HOME, IN_FLIGHT, MUTATED, TRANSITIONS, Phase, next_phase
from rc.next_effects import Effect
from rc.projections import rollouts as rollout_fold
from rc.projections.control import ControlState, Publication, Update, evolve, state_digest
from rc.projections.engines import EngineState
from rc.projections.rollouts import ActiveRollout, Rollouts
from rc.projections.timeline import EngineTimes, Timeline, UpdateTimes, VersionCounts
from rc.projections.trajectories import Trajectory
from rc.versions import WeightIdentity
from tests.core.scenario import ENGINE, FLIGHT, Core, serving, turn, updating

# Written from mission.md, not from rc.lifecycle: a row per kind, a column per phase. "." is illegal, "home" is READY
# where the engine holds a version and JOINED where it does not.
MATRIX = """
                  ABSENT  JOINED   READY    DRAINING QUIESCED UPDATING     INVALIDATING VALIDATING RESUMING TAINTED
engine_joined     JOINED  .        .        .        .        .            .            .          .        .
engine_lost       .       ABSENT   ABSENT   ABSENT   ABSENT   .            .            .          ABSENT   ABSENT
admit             .       .        READY    .        .        .            .            .          .        .
finish_rollout    .       .        READY    DRAINING .        .            .            .          RESUMING TAINTED
abort_rollout     .       .        READY    DRAINING .        .            .            .          RESUMING TAINTED
drain             .       DRAINING DRAINING .        .        .            .            .          .        .
quiesced          .       .        .        QUIESCED .        .            .            .          .        .
begin_update      .       .        .        .        UPDATING .            .            .          .        .
installed         .       .        .        .        .        INVALIDATING .            .          .        .
invalidated       .       .        .        .        .        .            VALIDATING   .          .        .
validated         .       .        .        .        .        .            .            RESUMING   .        .
resumed           .       .        .        .        .        .            .            .          home     .
update_abandoned  .       .        .        RESUMING RESUMING RESUMING     .            .          .        .
tainted           .       TAINTED  TAINTED  TAINTED  TAINTED  TAINTED      TAINTED      TAINTED    TAINTED  .
controller_started .      .        .        .        .        .            .            .          .        .
request_update    .       .        .        .        .        .            .            .          .        .
committed         .       .        .        .        .        .            .            .          .        .
"""


def matrix() -> dict[tuple[Phase, str], str | None]:
    """Read the table above."""
    header, *rows = MATRIX.strip().splitlines()
    phases = [Phase[name] for name in header.split()]
    cells: dict[tuple[Phase, str], str | None] = {}
    for row in rows:
        kind, *targets = row.split()
        for phase, target in zip(phases, targets, strict=True):
            cells[phase, kind] = None if target == "." else target
    return cells


CELLS = matrix()


def test_the_table_of_this_test_has_every_cell() -> None:
    assert set(CELLS) == set(itertools.product(Phase, EVENT_TYPES))


def test_every_phase_has_a_row_in_the_lifecycle_table() -> None:
    assert set(TRANSITIONS) == set(Phase)


@pytest.mark.parametrize("holds_version", [True, False])
@pytest.mark.parametrize(("phase", "kind"), CELLS)
def test_a_cell_leads_where_the_mission_says_or_is_illegal(phase: Phase, kind: str, *, holds_version: bool) -> None:
    target = CELLS[phase, kind]
    if target is None:
        with pytest.raises(IllegalTransition) as caught:
            next_phase("engine-7", phase, kind, holds_version=holds_version)
        assert (caught.value.kind, caught.value.state, caught.value.subject) == (kind, phase.name, "engine engine-7")
        assert str(caught.value) == f"{kind} is not allowed while engine engine-7 is {phase.name}"
        return
    home = "READY" if holds_version else "JOINED"
    expected = Phase[home if target == "home" else target]
    assert next_phase("engine-7", phase, kind, holds_version=holds_version) is expected


def test_tainted_has_one_way_out_which_is_the_end_of_the_process() -> None:
    leaving = {kind for kind, target in TRANSITIONS[Phase.TAINTED].items() if target is not Phase.TAINTED}
    assert leaving == {"engine_lost"}


def test_only_ready_admits() -> None:
    assert [phase for phase in Phase if "admit" in TRANSITIONS[phase]] == [Phase.READY]


def test_only_resumed_leads_home() -> None:
    home = [(phase, kind) for phase, row in TRANSITIONS.items() for kind, target in row.items() if target is HOME]
    assert home == [(Phase.RESUMING, "resumed")]


def test_phases_with_an_effect_under_way_and_phases_that_mutate() -> None:
    assert set(FLIGHT) == IN_FLIGHT
    assert {Phase.UPDATING, Phase.INVALIDATING, Phase.VALIDATING} == MUTATED


# ----------------------------------------------------------------------------- the same cells, through the whole state

SHOWN = Observation(boot="e-1", label="rc-0", paused=True)
IDENTITY = WeightIdentity(run="r", step=1)


def requested(state: ControlState) -> ControlState:
    """Give the state with u1 requested and nothing drained yet: the middle of a decision, where `drain` is due."""
    event = events.RequestUpdate(
        at=1.0, update="u1", target=state.next_version, identity=IDENTITY, path="one_phase", engines=(ENGINE,)
    )
    return evolve(state, event)


def with_rollout(state: ControlState) -> ControlState:
    """Give the state with rollout r1 active on the engine, whether or not its phase can have one."""
    admitted = events.Admit(at=1.0, rollout="r1", engine=ENGINE, version=0, lease_s=60.0)
    engine = msgspec.structs.replace(state.engine(ENGINE), active=1)
    return msgspec.structs.replace(
        state, rollouts=rollout_fold.admit(state.rollouts, admitted), engines=state.engines.set(ENGINE, engine)
    )


def a_state(phase: Phase) -> ControlState:
    """Give a state whose engine is in this phase, by events."""
    match phase:
        case Phase.ABSENT:
            return Core().state
        case Phase.JOINED:
            core = Core()
            core.join(boot="e-1")
            return requested(core.state)
        case Phase.READY:
            return requested(serving().state)
        case Phase.TAINTED:
            core = serving()
            core.join(boot="e-1", label="rc-9")
            return core.state
        case _:
            return updating(phase).state


def an_event(kind: str, state: ControlState) -> Event:
    """Give an event of this kind that fits the state in everything but, perhaps, the phase."""
    target = state.next_version
    every: tuple[Event, ...] = (
        events.ControllerStarted(at=9.0, controller="c2", epoch=state.epoch + 1),
        events.EngineJoined(at=9.0, engine=ENGINE, boot="e-2", label="default"),
        events.EngineLost(at=9.0, engine=ENGINE, boot="e-1", reason="killed"),
        events.Admit(at=9.0, rollout="r2", engine=ENGINE, version=0, lease_s=60.0),
        events.FinishRollout(at=9.0, rollout="r1", engine=ENGINE, version=0, turns=(turn("rc-0"),)),
        events.AbortRollout(at=9.0, rollout="r1", engine=ENGINE, version=0, reason="cancelled"),
        events.RequestUpdate(
            at=9.0, update="u1", target=target, identity=IDENTITY, path="one_phase", engines=(ENGINE,)
        ),
        events.Drain(at=9.0, update="u1", engine=ENGINE, active=0),
        events.Quiesced(at=9.0, update="u1", engine=ENGINE, evidence=PauseReport(observed=SHOWN)),
        events.BeginUpdate(
            at=9.0, update="u1", engine=ENGINE, target=target, base=0, evidence=PreflightReport(observed=SHOWN)
        ),
        events.Installed(
            at=9.0,
            update="u1",
            engine=ENGINE,
            target=target,
            evidence=InstallReport(observed=SHOWN, mutation="complete"),
        ),
        events.Invalidated(at=9.0, update="u1", engine=ENGINE, evidence=CacheReport(observed=SHOWN)),
        events.Validated(at=9.0, update="u1", engine=ENGINE, evidence=ValidationReport(observed=SHOWN)),
        events.Resumed(at=9.0, update="u1", engine=ENGINE, evidence=ResumeReport(observed=SHOWN)),
        events.Committed(at=9.0, update="u1", version=target, identity=IDENTITY, engines=(ENGINE,)),
        events.UpdateAbandoned(at=9.0, update="u1", reason="cancelled"),
        events.Tainted(at=9.0, engine=ENGINE, reason="in doubt"),
    )
    return {event.kind: event for event in every}[kind]


CONTROL_LEVEL = {"controller_started", "request_update", "committed"}
ENGINE_LEVEL = [(phase, kind) for phase, kind in CELLS if kind not in CONTROL_LEVEL]


@pytest.mark.parametrize(("phase", "kind"), ENGINE_LEVEL)
def test_evolve_obeys_the_cell_and_an_illegal_event_changes_nothing(phase: Phase, kind: str) -> None:
    state = a_state(phase)
    assert state.engine(ENGINE).phase is phase
    if kind in ("finish_rollout", "abort_rollout"):
        state = with_rollout(state)
    event, before = an_event(kind, state), state_digest(state)
    target = CELLS[phase, kind]
    if target is None:
        with pytest.raises(IllegalTransition):
            evolve(state, event)
    else:
        after = evolve(state, event)
        assert after.engine(ENGINE).phase is Phase["READY" if target == "home" else target]
        assert state_digest(after) != before
    assert state_digest(state) == before


# ------------------------------------------------------------------------------------------------ control-level events


@pytest.mark.parametrize("phase", list(Phase))
def test_controller_started_is_legal_in_every_phase_and_doubts_what_was_in_flight(phase: Phase) -> None:
    state = a_state(phase)
    after = evolve(state, an_event("controller_started", state))
    assert after.engine(ENGINE).phase is phase
    assert after.engine(ENGINE).in_doubt is (phase in FLIGHT)
    assert (after.controller, after.epoch) == ("c2", state.epoch + 1)


@pytest.mark.parametrize("epoch", [0, 1])
def test_controller_started_needs_a_newer_epoch(epoch: int) -> None:
    state = serving().state
    with pytest.raises(IllegalTransition, match=rf"at epoch 1$|offered epoch {epoch}"):
        evolve(state, events.ControllerStarted(at=9.0, controller="c2", epoch=epoch))


@pytest.mark.parametrize("phase", list(Phase))
def test_request_update_is_legal_while_none_is_in_progress(phase: Phase) -> None:
    state = a_state(phase)
    event = an_event("request_update", state)
    if state.update is not None:
        with pytest.raises(IllegalTransition, match="request_update is not allowed while update u1 is in progress"):
            evolve(state, event)
    else:
        after = evolve(state, event)
        assert after.update is not None
        assert after.update.target == state.next_version


@pytest.mark.parametrize("offset", [-1, 1])
def test_request_update_takes_the_next_number(offset: int) -> None:
    state = serving().state
    wrong = msgspec.structs.replace(an_event("request_update", state), target=state.next_version + offset)
    with pytest.raises(IllegalTransition, match=rf"offered rc-{state.next_version + offset}.* is at rc-1 next"):
        evolve(state, wrong)


def test_request_update_needs_members() -> None:
    state = serving().state
    wrong = msgspec.structs.replace(an_event("request_update", state), engines=())
    with pytest.raises(IllegalTransition, match="without members"):
        evolve(state, wrong)


@pytest.mark.parametrize("phase", list(Phase))
def test_committed_is_illegal_until_every_member_is_ready_at_the_target(phase: Phase) -> None:
    state = a_state(phase)
    with pytest.raises(IllegalTransition, match="committed is not allowed"):
        evolve(state, an_event("committed", state))


def test_committed_is_legal_once_every_member_is_ready_at_the_target() -> None:
    state = updating(Phase.RESUMING).state
    state = evolve(state, an_event("resumed", state))
    after = evolve(state, an_event("committed", state))
    assert after.update is None
    assert after.published is not None
    assert (after.published.version, after.next_version) == (1, 2)


def test_committed_carries_the_version_that_was_requested() -> None:
    state = updating(Phase.RESUMING).state
    state = evolve(state, an_event("resumed", state))
    wrong = msgspec.structs.replace(an_event("committed", state), version=2)
    with pytest.raises(IllegalTransition, match=r"update u1 is towards rc-1$"):
        evolve(state, wrong)


@pytest.mark.parametrize("kind", ["committed", "update_abandoned"])
def test_an_update_ends_under_its_own_id(kind: str) -> None:
    state = updating(Phase.QUIESCED).state
    other = msgspec.structs.replace(an_event(kind, state), update="u7")
    with pytest.raises(IllegalTransition, match=f"{kind} is not allowed while update u7 is not in progress"):
        evolve(state, other)


STEPS = {
    Phase.READY: "drain",
    Phase.DRAINING: "quiesced",
    Phase.QUIESCED: "begin_update",
    Phase.UPDATING: "installed",
    Phase.INVALIDATING: "invalidated",
    Phase.VALIDATING: "validated",
    Phase.RESUMING: "resumed",
}


@pytest.mark.parametrize(("phase", "kind"), STEPS.items())
def test_a_step_belongs_to_the_update_in_progress(phase: Phase, kind: str) -> None:
    state = a_state(phase)
    other = msgspec.structs.replace(an_event(kind, state), update="u7")
    with pytest.raises(IllegalTransition, match=r"u7|resuming from update u1"):
        evolve(state, other)


@pytest.mark.parametrize(("phase", "kind"), [(Phase.QUIESCED, "begin_update"), (Phase.UPDATING, "installed")])
def test_a_step_names_the_target_of_its_update(phase: Phase, kind: str) -> None:
    state = a_state(phase)
    wrong = msgspec.structs.replace(an_event(kind, state), target=7)
    with pytest.raises(IllegalTransition, match=r"update u1 is towards rc-1$"):
        evolve(state, wrong)


def test_an_engine_that_runs_rollouts_is_not_quiesced() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    with pytest.raises(IllegalTransition, match="running 1 rollouts"):
        evolve(core.state, an_event("quiesced", core.state))


@pytest.mark.parametrize("wrong", [{"engine": "other"}, {"version": 7}])
@pytest.mark.parametrize("kind", ["finish_rollout", "abort_rollout"])
def test_a_rollout_ends_on_the_engine_and_version_that_it_is_bound_to(kind: str, wrong: dict[str, object]) -> None:
    core = serving()
    core.admit("r1")
    event = msgspec.structs.replace(an_event(kind, core.state), **wrong)
    with pytest.raises(IllegalTransition, match=r"rollout r1 is bound to rc-0 on engine e$"):
        evolve(core.state, event)


@pytest.mark.parametrize("version", [-1, 1])
def test_a_rollout_is_admitted_under_the_published_version_alone(version: int) -> None:
    state = serving().state
    with pytest.raises(IllegalTransition, match=f"engine e is not serving rc-{version}"):
        evolve(state, msgspec.structs.replace(an_event("admit", state), version=version))


@pytest.mark.parametrize("wrong", [{}, {"engine": "stranger"}])
def test_only_a_member_of_an_update_drains(wrong: dict[str, object]) -> None:
    core = serving()
    core.join("stranger", boot="s-1")
    state = requested(core.state) if wrong else core.state
    with pytest.raises(IllegalTransition, match=r"drain is not allowed while engine .* is not part of update u1"):
        evolve(state, msgspec.structs.replace(an_event("drain", state), **wrong))


STATES = (ControlState, Update, Publication, EngineState, Rollouts, ActiveRollout, Trajectory, UpdateTimes, EngineTimes)


@pytest.mark.parametrize("state", [*STATES, VersionCounts, Timeline, *get_args(Effect)])
def test_what_is_folded_or_called_for_is_frozen_and_named(state: type[msgspec.Struct]) -> None:
    assert state.__struct_config__.frozen
    with pytest.raises(TypeError, match="positional"):
        cast(Any, state)("")


def test_a_rollout_is_admitted_once() -> None:
    core = serving()
    (admitted,) = core.admit("r1")
    with pytest.raises(IllegalTransition, match="rollout r1 is already active"):
        evolve(core.state, admitted)
