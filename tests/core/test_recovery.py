"""A controller dies in each phase; its successor settles what is in doubt by what the engine shows."""

from __future__ import annotations

import pytest

from rc.events import types as events
from rc.evidence import LookReport, Observation
from rc.lifecycle import Phase
from rc.next_effects import LookAtEngine, ResetCaches, ResumeEngine, ValidateEngine
from tests.core.scenario import FLIGHT, Core, kinds, serving, updating


def crashed(phase: Phase) -> Core:
    """Give a core whose controller died in this phase of u1 (rc-0 to rc-1) and was replaced."""
    core = updating(phase)
    core.start("c2")
    assert core.engine.in_doubt
    return core


def seen(label: str | None = "rc-0", *, boot: str | None = "e-1", paused: bool | None = True) -> Observation:
    """One look at the engine; by default as the update towards rc-1 found it once it was paused."""
    return Observation(boot=boot, label=label, paused=paused)


NOTHING_MUTATED = [(Phase.DRAINING, False), (Phase.DRAINING, True), (Phase.QUIESCED, True), (Phase.QUIESCED, False)]


@pytest.mark.parametrize(("phase", "paused"), NOTHING_MUTATED)
def test_nothing_mutated_goes_back_to_the_old_version(phase: Phase, *, paused: bool) -> None:
    core = crashed(phase)
    (look,) = core.effects
    assert isinstance(look, LookAtEngine)
    (abandoned,) = core.report(LookReport(observed=seen(paused=paused)))
    assert isinstance(abandoned, events.UpdateAbandoned)
    assert abandoned.reason == "its controller ended before weights were touched"
    assert [type(effect) for effect in core.effects] == [ResumeEngine]
    core.settle()
    assert core.phase() is Phase.READY
    (admitted,) = core.admit("r1")
    assert isinstance(admitted, events.Admit)
    assert admitted.version == 0


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.QUIESCED])
def test_before_mutation_an_unreadable_engine_must_still_show_that_it_resumed(phase: Phase) -> None:
    core = crashed(phase)
    assert kinds(core.report(LookReport(observed=Observation(problem="timed out")))) == ["update_abandoned"]
    assert core.phase() is Phase.RESUMING


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.QUIESCED])
@pytest.mark.parametrize(
    ("observed", "expected"),
    [(seen("rc-7"), ["tainted"]), (seen("default", boot="e-2", paused=False), ["update_abandoned", "engine_lost"])],
)
def test_before_mutation_a_touched_or_restarted_engine_does_not_go_back(
    phase: Phase, observed: Observation, expected: list[str]
) -> None:
    assert kinds(crashed(phase).report(LookReport(observed=observed))) == expected


def test_a_provably_complete_install_goes_on_to_commit() -> None:
    core = crashed(Phase.UPDATING)
    (installed,) = core.report(LookReport(observed=seen("rc-1")))
    assert isinstance(installed, events.Installed)
    assert installed.evidence == LookReport(observed=seen("rc-1"))
    core.settle()
    assert core.phase() is Phase.READY
    assert core.state.published is not None
    assert core.state.published.version == 1


@pytest.mark.parametrize(
    "observed",
    [
        seen("rc-0"),
        seen("rc-1", paused=False),
        seen("rc-1", boot="e-2"),
        seen("rc-2"),
        seen("default"),
        seen(None),
        seen("rc-1", paused=None),
        seen("rc-1", boot=None),
        Observation(gone=True, problem="connection refused"),
    ],
)
def test_an_install_that_cannot_be_shown_to_be_complete_taints_with_the_evidence(observed: Observation) -> None:
    core = crashed(Phase.UPDATING)
    (tainted,) = core.report(LookReport(observed=observed))
    assert isinstance(tainted, events.Tainted)
    assert tainted.evidence == LookReport(observed=observed)
    assert tainted.update == "u1"
    assert core.state.next_version == 2
    assert core.effects == ()


def adopting() -> Core:
    """Give a core whose controller died while the first engine was being labelled rc-0."""
    core = Core()
    core.start()
    core.join(boot="e-1")
    core.update("u0", path="adopt")
    core.advance(Phase.UPDATING)
    core.start("c2")
    return core


def test_an_adoption_changes_no_weights_so_an_unlabelled_engine_goes_back() -> None:
    core = adopting()
    assert kinds(core.report(LookReport(observed=seen("default")))) == ["update_abandoned"]
    core.settle()
    assert core.phase() is Phase.JOINED
    core.publish("u1", path="adopt")
    assert core.state.published is not None
    assert core.state.published.version == 0


@pytest.mark.parametrize(
    ("observed", "expected"),
    [(seen("rc-0"), ["installed"]), (seen("default", paused=False), ["tainted"]), (seen("rc-3"), ["tainted"])],
)
def test_an_adoption_is_judged_like_any_install_otherwise(observed: Observation, expected: list[str]) -> None:
    assert kinds(adopting().report(LookReport(observed=observed))) == expected


@pytest.mark.parametrize(
    ("phase", "effect"),
    [
        (Phase.INVALIDATING, ResetCaches),
        (Phase.VALIDATING, ValidateEngine),
        (Phase.RESUMING, ResumeEngine),
    ],
)
def test_effects_that_may_be_repeated_are_repeated(phase: Phase, effect: type) -> None:
    core = crashed(phase)
    assert [type(called) for called in core.effects] == [effect]
    core.settle()
    assert core.phase() is Phase.READY
    assert not core.engine.in_doubt
    assert core.state.published is not None
    assert core.state.published.version == 1


def test_a_resume_from_an_abandoned_update_is_repeated() -> None:
    core = updating(Phase.QUIESCED)
    core.abandon("u1")
    core.start("c2")
    assert [type(effect) for effect in core.effects] == [ResumeEngine]
    core.settle()
    assert core.phase() is Phase.READY
    assert core.engine.version == 0


@pytest.mark.parametrize("phase", FLIGHT)
def test_a_second_crash_leaves_the_same_doubt(phase: Phase) -> None:
    core = crashed(phase)
    effects = core.effects
    core.start("c3")
    assert core.engine.in_doubt
    assert core.effects == effects


@pytest.mark.parametrize("phase", FLIGHT)
def test_doubt_ends_with_the_first_step_taken_on_evidence(phase: Phase) -> None:
    core = crashed(phase)
    if phase in (Phase.DRAINING, Phase.QUIESCED, Phase.UPDATING):
        core.report(LookReport(observed=seen("rc-1" if phase is Phase.UPDATING else "rc-0")))
    else:
        core.step()
    assert not core.engine.in_doubt


@pytest.mark.parametrize(
    ("phase", "observed", "expected"),
    [
        (Phase.DRAINING, seen(paused=False), ["update_abandoned"]),
        (Phase.QUIESCED, seen(), ["update_abandoned"]),
        (Phase.UPDATING, seen("rc-1"), ["installed"]),
        (Phase.UPDATING, seen("rc-0"), ["tainted"]),
        (Phase.INVALIDATING, seen("rc-1"), []),
        (Phase.VALIDATING, seen("rc-1"), []),
        (Phase.RESUMING, seen("rc-1"), []),
    ],
)
def test_joining_the_engine_that_is_in_doubt_settles_it_by_the_same_rules(
    phase: Phase, observed: Observation, expected: list[str]
) -> None:
    core = crashed(phase)
    assert observed.boot is not None
    assert kinds(core.join(boot=observed.boot, label=observed.label, paused=observed.paused)) == expected


@pytest.mark.parametrize("phase", FLIGHT)
def test_joining_a_restarted_engine_that_is_in_doubt_ends_the_update(phase: Phase) -> None:
    core = crashed(phase)
    core.join(boot="e-2")
    assert core.phase() is Phase.JOINED
    assert core.state.update is None
    assert core.effects == ()


def test_a_crash_outside_an_update_leaves_no_doubt() -> None:
    core = serving()
    core.start("c2")
    assert not core.engine.in_doubt
    assert core.effects == ()
    assert kinds(core.admit("r1")) == ["admit"]


def test_a_taint_outlives_the_controller() -> None:
    core = crashed(Phase.UPDATING)
    core.report(LookReport(observed=seen("rc-0")))
    core.start("c3")
    assert core.phase() is Phase.TAINTED
    assert core.join(boot="e-1", label="rc-0") == ()
