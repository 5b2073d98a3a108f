"""Engine processes that join, restart, are tainted or lost, and controllers that take over."""

from __future__ import annotations

import msgspec
import pytest

from rc.commands import JoinEngine, StartController
from rc.decide import decide
from rc.errors import (
    EngineLost,
    EngineUnreachable,
    EngineUnsuitable,
    IllegalTransition,
    NotAdmitted,
)
from rc.events import types as events
from rc.evidence import InstallReport, Observation
from rc.lifecycle import Phase
from tests.core.scenario import ENGINE, FLIGHT, Core, kinds, serving, updating

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
