"""State is keyed by engine: an update reaches every member, and one that fails never takes the others' word for it."""

from __future__ import annotations

import pytest

from rc.errors import IllegalTransition, NotAdmitted
from rc.events import types as events
from rc.evidence import InstallReport, LookReport, Observation
from rc.lifecycle import IN_FLIGHT, Phase
from tests.core.scenario import Core, kinds, serving, turn, unreadable


def pair(phase_a: Phase, phase_b: Phase) -> Core:
    """Give a core with engines a and b in these phases of u1 towards rc-1; READY is READY at rc-1, unpublished."""
    core = serving("a", "b")
    core.update("u1")
    for engine, phase in (("a", phase_a), ("b", phase_b)):
        core.advance(phase, engine)
    return core


BEFORE = (Phase.DRAINING, Phase.QUIESCED)
AFTER = (Phase.UPDATING, Phase.INVALIDATING, Phase.VALIDATING, Phase.RESUMING, Phase.READY)
PAIRS = [(a, b) for a in (*BEFORE, *AFTER) for b in (*BEFORE, *AFTER) if not a is b is Phase.READY]
"""Where two members can be at once. Both READY at the target is the commit."""


def the_update_can_end(core: Core) -> None:
    """Whatever happened: no update stays in progress without a member that is on its way."""
    if core.state.update is not None:
        phases = [core.state.engine(name).phase for name in core.state.update.engines]
        assert any(phase in IN_FLIGHT for phase in phases), phases
    core.settle()
    assert core.state.update is None


def test_a_version_is_published_once_every_member_serves_it() -> None:
    core = pair(Phase.READY, Phase.RESUMING)
    assert core.state.published is not None
    assert core.state.published.version == 0
    assert kinds(core.step("b")) == ["resumed", "committed"]
    assert core.state.published.version == 1


@pytest.mark.parametrize("other", [*BEFORE, *AFTER])
def test_an_engine_ahead_of_the_others_admits_nothing(other: Phase) -> None:
    core = pair(Phase.READY if other is not Phase.READY else Phase.VALIDATING, other)
    with pytest.raises(NotAdmitted, match="in an update") as caught:
        core.admit("r1")
    assert caught.value.transient


@pytest.mark.parametrize("other", BEFORE)
@pytest.mark.parametrize("phase", BEFORE)
def test_a_failure_before_anybody_mutated_gives_the_update_up_for_all(phase: Phase, other: Phase) -> None:
    core = pair(phase, other)
    (effect,) = (effect for effect in core.effects if effect.engine == "a")
    assert kinds(core.report(unreadable(effect, core.state), "a")) == ["update_abandoned"]
    assert core.state.engine("b").phase is Phase.RESUMING
    the_update_can_end(core)
    assert core.state.engine("a").phase is core.state.engine("b").phase is Phase.READY


@pytest.mark.parametrize("other", AFTER)
@pytest.mark.parametrize("phase", BEFORE)
def test_a_failure_after_another_member_mutated_takes_only_this_one_out(phase: Phase, other: Phase) -> None:
    core = pair(phase, other)
    (effect,) = (effect for effect in core.effects if effect.engine == "a")
    expected = ["tainted", "committed"] if other is Phase.READY else ["tainted"]
    assert kinds(core.report(unreadable(effect, core.state), "a")) == expected
    the_update_can_end(core)
    assert core.state.published is not None
    assert core.state.published.version == 1
    assert core.state.engine("b").version == 1


@pytest.mark.parametrize("other", [*BEFORE, *AFTER])
def test_an_install_that_was_never_sent_while_another_member_goes_on(other: Phase) -> None:
    core = pair(Phase.UPDATING, other)
    observed = Observation(boot="a-1", label="rc-0", paused=True)
    happened = core.report(InstallReport(observed=observed, mutation="none", problem="refused"), "a")
    if other in BEFORE:
        assert kinds(happened) == ["update_abandoned"]
    else:
        assert happened[0].kind == "tainted"
    the_update_can_end(core)


@pytest.mark.parametrize(("phase", "other"), PAIRS)
def test_losing_a_member_never_leaves_an_update_that_cannot_end(phase: Phase, other: Phase) -> None:
    core = pair(phase, other)
    happened = kinds(core.lose("a"))
    if phase in BEFORE and other in BEFORE:
        assert happened == ["update_abandoned", "engine_lost"]
    elif phase in (*BEFORE, Phase.READY):
        assert happened == (["engine_lost", "committed"] if other is Phase.READY else ["engine_lost"])
    else:
        assert happened == (["tainted", "committed"] if other is Phase.READY else ["tainted"])
    the_update_can_end(core)


@pytest.mark.parametrize(("phase", "other"), PAIRS)
def test_a_member_that_restarts_never_leaves_an_update_that_cannot_end(phase: Phase, other: Phase) -> None:
    core = pair(phase, other)
    happened = kinds(core.join("a", boot="a-2"))
    assert happened[-1] == "engine_joined"
    the_update_can_end(core)
    core.publish("u2", step=2)
    assert core.state.engine("a").version == core.state.engine("b").version


@pytest.mark.parametrize(("phase", "other"), PAIRS)
@pytest.mark.parametrize("label", ["rc-0", "rc-1", "rc-9", None])
def test_a_crash_never_leaves_an_update_that_cannot_end(phase: Phase, other: Phase, label: str | None) -> None:
    core = pair(phase, other)
    core.start("c2")
    for engine in ("a", "b"):
        if core.state.engine(engine).in_doubt and core.state.engine(engine).phase in (*BEFORE, Phase.UPDATING):
            observed = Observation(boot=f"{engine}-1", label=label, paused=True)
            core.report(LookReport(observed=observed), engine)
    the_update_can_end(core)


def test_the_last_member_that_is_tainted_takes_the_update_and_its_number_along() -> None:
    core = pair(Phase.UPDATING, Phase.UPDATING)
    assert kinds(core.lose("a")) == ["tainted"]
    alone = core.state.update
    assert alone is not None
    assert alone.engines == ("b",)
    assert kinds(core.lose("b")) == ["tainted"]
    ended = core.state
    assert (ended.update, ended.next_version) == (None, 2)


def test_a_member_at_the_target_that_restarts_burns_the_number_with_it() -> None:
    core = pair(Phase.READY, Phase.UPDATING)
    core.join("a", boot="a-2")
    observed = Observation(boot="b-1", label="rc-0", paused=True)
    assert kinds(core.report(InstallReport(observed=observed, mutation="none"), "b")) == ["update_abandoned"]
    core.settle()
    (requested, *_) = core.update("u2")
    assert isinstance(requested, events.RequestUpdate)
    assert requested.target == 2


def test_an_update_is_not_abandoned_once_one_member_mutates() -> None:
    core = pair(Phase.QUIESCED, Phase.UPDATING)
    with pytest.raises(IllegalTransition, match="engine b is UPDATING"):
        core.abandon("u1")


def test_a_commit_names_the_members_that_hold_the_version() -> None:
    core = pair(Phase.QUIESCED, Phase.READY)
    _, committed = core.lose("a")
    assert isinstance(committed, events.Committed)
    assert committed.engines == ("b",)


def test_a_span_mismatch_while_the_others_are_done_commits_without_the_engine() -> None:
    core = serving("a", "b")
    core.admit("r1")
    core.update("u1")
    core.advance(Phase.READY, "b")
    assert core.state.rollouts.active["r1"].engine == "a"
    assert kinds(core.end("r1", turn("rc-9"))) == ["abort_rollout", "tainted", "committed"]
    (admitted,) = core.admit("r2")
    assert isinstance(admitted, events.Admit)
    assert (admitted.engine, admitted.version) == ("b", 1)


def test_an_engine_that_joins_in_mid_update_is_no_member_of_it() -> None:
    core = pair(Phase.UPDATING, Phase.QUIESCED)
    assert kinds(core.join("c", boot="c-1")) == ["engine_joined"]
    core.settle()
    assert core.state.engine("c").phase is Phase.JOINED
    assert core.state.engine("c").version is None
