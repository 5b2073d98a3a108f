"""Commands of users: admission, ends of rollouts, updates, joining and losing engines, controllers."""

from __future__ import annotations

import math

import msgspec
import pytest

from rc.commands import AbandonUpdate, AdmitRollout, EndRollout, JoinEngine, StartController
from rc.decide import decide
from rc.errors import (
    CallerError,
    EngineLost,
    EngineTainted,
    EngineUnreachable,
    EngineUnsuitable,
    IllegalTransition,
    InvalidIdentity,
    InvalidTrajectory,
    InvalidWeights,
    NotAdmitted,
    UnknownRollout,
    UpdateInProgress,
)
from rc.events import types as events
from rc.events.types import Span
from rc.evidence import InstallReport, Observation, PauseReport
from rc.lifecycle import Phase
from rc.next_effects import PauseEngine
from tests.core.scenario import ENGINE, FLIGHT, Core, kinds, serving, turn, updating

# ----------------------------------------------------------------------------------------------------------- admission


def test_a_rollout_is_bound_to_the_published_version() -> None:
    core = serving()
    core.publish("u1", step=1)
    assert core.admit("r1", lease_s=30.0) == (
        events.Admit(at=core.at, rollout="r1", engine=ENGINE, version=1, lease_s=30.0),
    )


def test_nothing_is_admitted_before_anything_is_published() -> None:
    core = Core()
    core.start()
    core.join()
    with pytest.raises(NotAdmitted, match="publish with update") as caught:
        core.admit("r1")
    assert not caught.value.transient


@pytest.mark.parametrize("phase", FLIGHT)
def test_nothing_is_admitted_during_an_update_but_waiting_helps(phase: Phase) -> None:
    core = updating(phase)
    with pytest.raises(NotAdmitted, match=phase.name) as caught:
        core.admit("r1")
    assert caught.value.transient


def test_nothing_is_admitted_to_a_tainted_engine() -> None:
    core = serving()
    core.join(boot="e-1", label="rc-9")
    with pytest.raises(EngineTainted, match="attests 'rc-9'"):
        core.admit("r1")


def test_nothing_is_admitted_to_a_lost_engine() -> None:
    core = serving()
    core.lose()
    with pytest.raises(EngineLost, match="no engine is joined"):
        core.admit("r1")


def test_nothing_is_admitted_to_a_restarted_engine_before_an_update() -> None:
    core = serving()
    core.join(boot="e-2")
    with pytest.raises(NotAdmitted, match="it is new, or was restarted"):
        core.admit("r1")
    core.publish("u1", step=1)
    (admitted,) = core.admit("r1")
    assert isinstance(admitted, events.Admit)
    assert admitted.version == 1


def test_the_least_loaded_engine_is_chosen_and_ties_go_by_name() -> None:
    core = serving("b", "a")
    chosen = [event.engine for n in range(4) for event in core.admit(f"r{n}") if isinstance(event, events.Admit)]
    assert chosen == ["a", "b", "a", "b"]
    core.end("r0")
    core.end("r2")
    (admitted,) = core.admit("r9")
    assert isinstance(admitted, events.Admit)
    assert admitted.engine == "a"


def test_an_active_rollout_id_is_not_admitted_again() -> None:
    core = serving()
    core.admit("r1")
    with pytest.raises(NotAdmitted, match="already active") as caught:
        core.admit("r1")
    assert not caught.value.transient


@pytest.mark.parametrize("lease_s", [0.0, -1.0, math.nan, math.inf])
def test_a_lease_is_positive_and_finite(lease_s: float) -> None:
    core = serving()
    with pytest.raises(NotAdmitted, match="lease") as caught:
        decide(core.state, AdmitRollout(at=core.now, rollout="r1", lease_s=lease_s))
    assert not caught.value.transient


def test_a_lease_ends_so_long_after_the_admission() -> None:
    core = serving()
    core.admit("r1", lease_s=45.0)
    rollout = core.state.rollouts.active["r1"]
    assert rollout.lease_until - rollout.admitted_at == 45.0


# ---------------------------------------------------------------------------------------------------- ends of rollouts


def test_a_finished_rollout_keeps_its_turns_and_is_gone_from_the_active_ones() -> None:
    core = serving()
    core.admit("r1")
    turns = (turn("rc-0"), turn("rc-0", tokens=3))
    assert core.end("r1", *turns) == (
        events.FinishRollout(at=core.at, rollout="r1", engine=ENGINE, version=0, turns=turns),
    )
    assert core.engine.active == 0
    assert (core.state.rollouts.finished, core.state.rollouts.aborted) == (1, 0)
    assert not core.state.rollouts.active
    assert core.state.rollouts.fingerprint == 0


def test_a_rollout_ends_once() -> None:
    core = serving()
    core.admit("r1")
    core.end("r1")
    with pytest.raises(UnknownRollout, match="r1 is not active"):
        core.end("r1")
    with pytest.raises(UnknownRollout):
        core.abort("r1")


def test_aborting_one_unknown_rollout_aborts_none() -> None:
    core = serving()
    core.admit("r1")
    with pytest.raises(UnknownRollout, match="r2"):
        core.abort("r1", "r2")
    assert "r1" in core.state.rollouts.active


def test_a_rollout_that_is_named_twice_is_aborted_once() -> None:
    core = serving()
    core.admit("r1")
    assert kinds(core.abort("r1", "r1")) == ["abort_rollout"]


def test_aborting_no_rollout_is_no_event() -> None:
    assert serving().abort() == ()


def test_turns_are_kept_with_the_one_rollout_that_they_belong_to() -> None:
    core = serving()
    core.admit("r1")
    core.admit("r2")
    with pytest.raises(InvalidTrajectory, match="2 are to be aborted"):
        core.abort("r1", "r2", turns=(turn(),))
    (aborted,) = core.abort("r1", turns=(turn(),))
    assert isinstance(aborted, events.AbortRollout)
    assert aborted.turns == (turn(),)


def test_a_trajectory_that_does_not_fit_together_is_not_recorded() -> None:
    core = serving()
    core.admit("r1")
    with pytest.raises(InvalidTrajectory, match="rollout r1 has no turn"):
        core.give(EndRollout(at=core.now, rollout="r1", turns=()))
    assert "r1" in core.state.rollouts.active


@pytest.mark.parametrize("phase", [Phase.READY, Phase.DRAINING, Phase.RESUMING])
def test_a_contradicting_span_aborts_the_rollout_and_taints_the_engine(phase: Phase) -> None:
    core = serving()
    core.admit("r1")
    if phase is not Phase.READY:
        core.update("u1")
    if phase is Phase.RESUMING:
        core.abandon("u1")
    assert core.phase() is phase
    happened = core.end("r1", turn("rc-0"), turn("rc-1"))
    assert kinds(happened) == ["abort_rollout", "tainted"]
    aborted, tainted = happened
    assert isinstance(aborted, events.AbortRollout)
    assert isinstance(tainted, events.Tainted)
    assert aborted.reason == ("version mismatch: the engine attests 'rc-1' for tokens 0 to 2 of turn 1, not 'rc-0'")
    assert len(aborted.turns) == 2, "kept for audit"
    assert tainted.update == ("u1" if phase is Phase.DRAINING else None)
    assert core.phase() is Phase.TAINTED
    assert core.state.update is None


def test_a_contradicting_span_on_a_tainted_engine_only_aborts() -> None:
    core = serving()
    core.admit("r1")
    core.join(boot="e-1", label="rc-9")
    assert kinds(core.end("r1", turn("rc-9"))) == ["abort_rollout"]


def test_on_a_tainted_engine_an_attested_rollout_may_finish_and_an_unattested_one_may_not() -> None:
    core = serving()
    core.admit("r1")
    core.admit("r2")
    core.join(boot="e-1", label="rc-9")
    assert kinds(core.end("r1", turn("rc-0"))) == ["finish_rollout"]
    (aborted,) = core.end("r2", turn("rc-0"), turn(None))
    assert isinstance(aborted, events.AbortRollout)
    assert "did not attest" in aborted.reason


def test_a_rollout_without_spans_finishes_on_an_engine_in_service() -> None:
    core = serving()
    core.admit("r1")
    assert kinds(core.end("r1", turn(None))) == ["finish_rollout"]


# -------------------------------------------------------------------------------------------------------- strict drain


def test_an_update_drains_every_engine_and_waits_for_its_rollouts() -> None:
    core = serving()
    core.admit("r1")
    core.admit("r2")
    requested, drain = core.update("u1")
    assert isinstance(requested, events.RequestUpdate)
    assert (requested.target, requested.engines) == (1, (ENGINE,))
    assert drain == events.Drain(at=core.at, update="u1", engine=ENGINE, active=2)
    core.end("r1")
    assert not core.effects
    core.abort("r2")
    assert core.effects == (PauseEngine(engine=ENGINE, update="u1"),)


def test_a_pause_proves_nothing_while_rollouts_are_active() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    paused = PauseReport(observed=Observation(boot="e-1", label="rc-0", paused=True))
    with pytest.raises(IllegalTransition, match="PauseReport is not allowed while engine e is DRAINING"):
        core.report(paused)


def test_every_finish_of_a_version_comes_before_the_begin_update_towards_the_next() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    core.end("r1")
    core.settle()
    order = [event.kind for _, caused in core.decisions for event in caused]
    assert order.index("finish_rollout") < len(order) - order[::-1].index("begin_update") - 1
    assert order[-9:] == [
        "drain",
        "finish_rollout",
        "quiesced",
        "begin_update",
        "installed",
        "invalidated",
        "validated",
        "resumed",
        "committed",
    ]


# ------------------------------------------------------------------------------------------------------------- updates


@pytest.mark.parametrize("phase", FLIGHT)
def test_a_second_update_is_refused_while_one_is_in_progress(phase: Phase) -> None:
    core = updating(phase)
    with pytest.raises(UpdateInProgress, match="update u1 towards rc-1"):
        core.update("u2")


def test_an_update_is_refused_until_the_engines_of_an_abandoned_one_have_resumed() -> None:
    core = updating(Phase.QUIESCED)
    core.abandon("u1")
    with pytest.raises(UpdateInProgress, match="update u1"):
        core.update("u2")
    core.settle()
    assert kinds(core.update("u2")) == ["request_update", "drain"]


def test_an_update_without_an_engine_is_refused() -> None:
    core = Core()
    core.start()
    with pytest.raises(EngineLost, match="no engine is joined"):
        core.update("u1")
    core = serving()
    core.lose()
    with pytest.raises(EngineLost, match="no engine is joined"):
        core.update("u1")


def test_an_update_of_a_tainted_engine_is_refused() -> None:
    core = serving()
    core.join(boot="e-1", label="rc-9")
    with pytest.raises(EngineTainted, match="restart its server process"):
        core.update("u1")


@pytest.mark.parametrize(("run", "step", "allowed"), [("r", 5, True), ("r", 6, True), ("r", 4, False), ("s", 0, True)])
def test_an_identity_never_goes_backwards_within_a_run(run: str, step: int, *, allowed: bool) -> None:
    core = serving()
    core.publish("u1", step=5)
    if allowed:
        assert kinds(core.update("u2", run=run, step=step)) == ["request_update", "drain"]
        return
    with pytest.raises(InvalidIdentity, match="step 4 of run 'r' is behind the published step 5"):
        core.update("u2", run=run, step=step)
    assert core.state.update is None


@pytest.mark.parametrize(("loads", "sends", "allowed"), [
    ("aaaa", "aaaa", True), ("aaaa", "bbbb", False), (None, "bbbb", True), ("aaaa", None, True),
])  # fmt: skip
def test_weights_of_another_manifest_are_refused(loads: str | None, sends: str | None, *, allowed: bool) -> None:
    core = Core()
    core.start()
    core.join(manifest=loads)
    if allowed:
        assert kinds(core.update("u1", manifest=sends)) == ["request_update", "drain"]
        return
    with pytest.raises(InvalidWeights, match=r"manifest bbbb is not what engine e loads \(aaaa\)"):
        core.update("u1", manifest=sends)


def test_only_what_an_engine_loaded_at_its_start_is_adopted() -> None:
    core = serving()
    with pytest.raises(EngineUnsuitable, match="only a fresh one"):
        core.update("u1", path="adopt")


def test_a_fresh_engine_is_adopted_only_while_nothing_is_published() -> None:
    core = serving()
    core.join(boot="e-2")
    with pytest.raises(EngineUnsuitable, match="only a fresh one"):
        core.update("u1", path="adopt")


def test_an_adopted_engine_that_was_tainted_gives_its_number_away() -> None:
    core = Core()
    core.start()
    core.join()
    core.update("u0", path="adopt")
    core.advance(Phase.UPDATING)
    core.lose()
    core.join(boot="b2")
    (requested, _) = core.update("u1", path="adopt")
    assert isinstance(requested, events.RequestUpdate)
    assert requested.target == 1


def test_an_engine_that_still_attests_a_burned_number_is_not_adopted() -> None:
    core = Core()
    core.start()
    core.join()
    core.update("u0", path="adopt")
    core.advance(Phase.UPDATING)
    core.lose()
    core.join(boot="b2", label="rc-0")
    with pytest.raises(EngineUnsuitable, match="only a fresh one"):
        core.update("u1", path="adopt")


# ---------------------------------------------------------------------------------------------------------- abandoning


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.QUIESCED])
def test_before_mutation_an_update_is_abandoned_and_the_old_version_serves_again(phase: Phase) -> None:
    core = updating(phase)
    assert core.abandon("u1", "cancelled") == (events.UpdateAbandoned(at=core.at, update="u1", reason="cancelled"),)
    assert core.phase() is Phase.RESUMING
    core.settle()
    assert core.phase() is Phase.READY
    (admitted,) = core.admit("r1")
    assert isinstance(admitted, events.Admit)
    assert admitted.version == 0


def test_abandoning_while_draining_leaves_the_active_rollouts_alone() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    core.abandon("u1")
    assert core.phase() is Phase.RESUMING
    assert kinds(core.end("r1")) == ["finish_rollout"]
    core.settle()
    assert core.phase() is Phase.READY


@pytest.mark.parametrize("phase", [Phase.UPDATING, Phase.INVALIDATING, Phase.VALIDATING, Phase.RESUMING])
def test_after_mutation_began_an_update_cannot_be_abandoned(phase: Phase) -> None:
    core = updating(phase)
    with pytest.raises(IllegalTransition, match=f"update_abandoned is not allowed while engine e is {phase.name}"):
        core.abandon("u1")
    assert core.phase() is phase


def test_only_the_update_in_progress_is_abandoned() -> None:
    core = updating(Phase.QUIESCED)
    with pytest.raises(IllegalTransition, match="update u0 is not in progress"):
        decide(core.state, AbandonUpdate(at=core.now, update="u0", reason="cancelled"))
    core.abandon("u1")
    with pytest.raises(IllegalTransition, match="update u1 is not in progress"):
        core.abandon("u1")


def test_a_number_that_no_engine_ever_saw_is_used_by_the_next_update() -> None:
    core = updating(Phase.QUIESCED)
    core.abandon("u1")
    core.settle()
    (requested, _) = core.update("u2")
    assert isinstance(requested, events.RequestUpdate)
    assert requested.target == 1


# ------------------------------------------------------------------------------------------------------------- joining


def test_a_first_sight_joins_with_what_the_probe_found() -> None:
    core = Core()
    core.start()
    assert core.join(manifest="aaaa") == (
        events.EngineJoined(
            at=core.at,
            engine=ENGINE,
            boot="b1",
            label="default",
            profile="stock",
            vllm="0.32.0",
            model="policy",
            max_model_len=1024,
            manifest_digest="aaaa",
        ),
    )
    assert core.phase() is Phase.JOINED


def test_an_engine_that_cannot_be_read_does_not_join() -> None:
    core = Core()
    core.start()
    with pytest.raises(EngineUnreachable, match="engine e cannot be read: no reason given"):
        core.join(label=None)
    with pytest.raises(EngineUnreachable):
        core.join(paused=None)
    (join, _), *_ = serving().decisions[1:]
    assert isinstance(join, JoinEngine)
    nameless = Observation(label="default", paused=False, problem="/metrics timed out")
    with pytest.raises(EngineUnreachable, match="engine e cannot be read: /metrics timed out"):
        decide(core.state, msgspec.structs.replace(join, observed=nameless))


@pytest.mark.parametrize("label", ["rc-1", "rc-7", "step-100", "rc-01", "rc-" + "9" * 5000])
def test_an_engine_with_a_label_that_this_journal_never_published_does_not_join(label: str) -> None:
    core = serving()
    core.lose()
    with pytest.raises(EngineUnsuitable, match="never published"):
        core.join(boot="e-2", label=label)


def test_an_engine_with_a_label_of_this_journal_joins_but_serves_nothing() -> None:
    core = serving()
    core.lose()
    core.join(boot="e-1", label="rc-0")
    assert core.phase() is Phase.JOINED
    with pytest.raises(NotAdmitted):
        core.admit("r1")


def test_an_engine_that_somebody_else_paused_does_not_join() -> None:
    core = Core()
    core.start()
    with pytest.raises(EngineUnsuitable, match="is paused, and not by this controller"):
        core.join(paused=True)


def test_a_rejoin_of_an_unchanged_engine_is_no_event() -> None:
    core = serving()
    assert core.join(boot="e-1", label="rc-0") == ()
    assert core.phase() is Phase.READY


def test_a_foreign_label_on_an_engine_in_service_taints_it() -> None:
    core = serving()
    (tainted,) = core.join(boot="e-1", label="rc-4")
    assert isinstance(tainted, events.Tainted)
    assert tainted.reason == "attests 'rc-4' where rc left 'rc-0'"
    assert tainted.evidence is not None
    assert tainted.evidence.observed.label == "rc-4"


def test_a_foreign_pause_of_an_engine_in_service_taints_it() -> None:
    core = serving()
    (tainted,) = core.join(boot="e-1", label="rc-0", paused=True)
    assert isinstance(tainted, events.Tainted)
    assert "paused by somebody else" in tainted.reason


@pytest.mark.parametrize("phase", FLIGHT)
def test_a_rejoin_in_mid_update_says_nothing_that_the_effect_under_way_will_not(phase: Phase) -> None:
    core = updating(phase)
    assert core.join(boot="e-1", label="rc-7", paused=True) == ()


def test_a_restart_ends_the_rollouts_and_the_version_of_the_process() -> None:
    core = serving()
    core.admit("r1")
    core.admit("r2")
    assert kinds(core.join(boot="e-2")) == ["abort_rollout", "abort_rollout", "engine_lost", "engine_joined"]
    assert core.phase() is Phase.JOINED
    assert core.engine.version is None
    assert core.engine.active == 0
    assert core.state.published is not None


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.DRAINING, ["update_abandoned", "engine_lost", "engine_joined"]),
        (Phase.QUIESCED, ["update_abandoned", "engine_lost", "engine_joined"]),
        (Phase.UPDATING, ["tainted", "engine_lost", "engine_joined"]),
        (Phase.INVALIDATING, ["tainted", "engine_lost", "engine_joined"]),
        (Phase.VALIDATING, ["tainted", "engine_lost", "engine_joined"]),
        (Phase.RESUMING, ["tainted", "engine_lost", "engine_joined"]),
    ],
)
def test_a_restart_in_mid_update_ends_the_update(phase: Phase, expected: list[str]) -> None:
    core = updating(phase)
    assert kinds(core.join(boot="e-2")) == expected
    assert core.phase() is Phase.JOINED
    assert core.state.update is None
    core.publish("u2", step=1)
    assert core.phase() is Phase.READY


@pytest.mark.parametrize(("label", "paused"), [("rc-7", False), ("default", True)])
def test_a_restart_as_something_unsuitable_is_still_the_end_of_the_old_process(label: str, *, paused: bool) -> None:
    core = serving()
    core.admit("r1")
    assert kinds(core.join(boot="e-2", label=label, paused=paused)) == ["abort_rollout", "engine_lost"]
    with pytest.raises(EngineUnsuitable):
        core.join(boot="e-2", label=label, paused=paused)
    with pytest.raises(EngineLost):
        core.admit("r2")


# --------------------------------------------------------------------------------------------------------------- taint


def tainted() -> Core:
    """Give a core whose engine, boot e-1, was tainted when u1 towards rc-1 failed to install."""
    core = updating(Phase.UPDATING)
    observed = Observation(boot="e-1", label="rc-0", paused=True)
    core.report(InstallReport(observed=observed, mutation="possible", problem="sender died"))
    assert core.phase() is Phase.TAINTED
    return core


def test_a_number_burned_by_a_taint_is_never_used_again() -> None:
    core = tainted()
    assert core.state.update is None
    core.join(boot="e-2")
    (requested, _) = core.update("u2")
    assert isinstance(requested, events.RequestUpdate)
    assert requested.target == 2
    core.settle()
    assert core.state.published is not None
    assert core.state.published.version == 2


@pytest.mark.parametrize("label", ["rc-0", "rc-1", "default"])
def test_the_same_process_stays_tainted_whatever_it_attests(label: str) -> None:
    core = tainted()
    assert core.join(boot="e-1", label=label) == ()
    assert core.phase() is Phase.TAINTED


def test_a_tainted_process_that_shows_up_again_behind_another_is_tainted_again() -> None:
    core = tainted()
    core.join(boot="e-2")
    assert core.phase() is Phase.JOINED
    happened = core.join(boot="e-1", label="rc-0")
    assert kinds(happened) == ["engine_lost", "engine_joined", "tainted"]
    assert core.phase() is Phase.TAINTED
    assert core.engine.tainted_boots == ("e-1",)
    core.join(boot="e-3")
    core.publish("u2", step=1)
    assert kinds(core.join(boot="e-1", label="rc-0")) == ["engine_lost", "engine_joined", "tainted"]


def test_losing_a_tainted_engine_ends_its_rollouts_and_keeps_it_tainted() -> None:
    core = serving()
    core.admit("r1")
    core.join(boot="e-1", label="rc-9")
    assert kinds(core.lose()) == ["abort_rollout"]
    assert core.phase() is Phase.TAINTED
    assert core.lose() == ()


# -------------------------------------------------------------------------------------------------------------- losing


def test_losing_an_engine_ends_its_rollouts_in_the_order_of_their_ids() -> None:
    core = serving()
    for rollout in ("r2", "r1", "r3"):
        core.admit(rollout)
    happened = core.lose(reason="exit code -9")
    assert kinds(happened) == ["abort_rollout", "abort_rollout", "abort_rollout", "engine_lost"]
    aborted = [event for event in happened if isinstance(event, events.AbortRollout)]
    assert [event.rollout for event in aborted] == ["r1", "r2", "r3"]
    assert {event.reason for event in aborted} == {"engine lost: exit code -9"}
    assert core.phase() is Phase.ABSENT


@pytest.mark.parametrize(
    ("phase", "expected", "after"),
    [
        (Phase.DRAINING, ["update_abandoned", "engine_lost"], Phase.ABSENT),
        (Phase.QUIESCED, ["update_abandoned", "engine_lost"], Phase.ABSENT),
        (Phase.UPDATING, ["tainted"], Phase.TAINTED),
        (Phase.INVALIDATING, ["tainted"], Phase.TAINTED),
        (Phase.VALIDATING, ["tainted"], Phase.TAINTED),
        (Phase.RESUMING, ["tainted"], Phase.TAINTED),
    ],
)
def test_losing_an_engine_in_mid_update_ends_the_update(phase: Phase, expected: list[str], after: Phase) -> None:
    core = updating(phase)
    assert kinds(core.lose()) == expected
    assert core.phase() is after
    assert core.state.update is None
    assert core.effects == ()


def test_losing_an_engine_while_draining_aborts_its_rollouts_before_the_update() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    assert kinds(core.lose()) == ["abort_rollout", "update_abandoned", "engine_lost"]


def test_losing_an_engine_that_resumes_from_an_abandoned_update() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    core.abandon("u1")
    assert kinds(core.lose()) == ["abort_rollout", "engine_lost"]


def test_losing_what_is_absent_is_no_event() -> None:
    assert Core().lose("never-seen") == ()


# --------------------------------------------------------------------------------------------------------- controllers


def test_a_new_controller_aborts_what_its_predecessor_left_active() -> None:
    core = serving()
    core.admit("r2")
    core.admit("r1")
    happened = core.start("c2")
    assert kinds(happened) == ["controller_started", "abort_rollout", "abort_rollout"]
    assert [event.rollout for event in happened if isinstance(event, events.AbortRollout)] == ["r1", "r2"]
    assert core.engine.active == 0
    assert core.phase() is Phase.READY


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_controller_of_an_old_epoch_is_refused(epoch: int) -> None:
    core = serving()
    with pytest.raises(IllegalTransition, match="controller_started is not allowed"):
        decide(core.state, StartController(at=core.now, controller="c2", epoch=epoch))
    assert core.state.controller == "c1"


def test_a_refused_command_changes_nothing() -> None:
    core = updating(Phase.UPDATING)
    before = core.state
    with pytest.raises(CallerError):
        core.admit("r1")
    with pytest.raises(CallerError):
        core.update("u2")
    with pytest.raises(CallerError):
        core.abandon("u1")
    assert core.state is before


def test_spans_with_the_right_label_and_a_gap_abort_too() -> None:
    core = serving()
    core.admit("r1")
    gapped = turn("rc-0", tokens=4)
    gapped = type(gapped)(
        prompt_token_ids=gapped.prompt_token_ids,
        token_ids=gapped.token_ids,
        spans=(Span(label="rc-0", start=0, end=1), Span(label="rc-0", start=2, end=4)),
    )
    assert kinds(core.end("r1", gapped)) == ["abort_rollout", "tainted"]
