"""Rollouts: when one is admitted, to which engine and version, and how it ends."""

from __future__ import annotations

import math

import pytest

from rc.commands import AdmitRollout, EndRollout
from rc.decide import decide
from rc.errors import (
    EngineLost,
    EngineTainted,
    InvalidTrajectory,
    NotAdmitted,
    UnknownRollout,
)
from rc.events import types as events
from rc.events.types import Span
from rc.lifecycle import Phase
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
