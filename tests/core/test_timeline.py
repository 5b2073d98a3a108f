"""Where the time of an update went, from the journal's own times."""

from __future__ import annotations

import msgspec
import pytest

from rc.events import types as events
from rc.events.types import Event
from rc.evidence import InstallReport, LookReport, Observation, PauseReport
from rc.lifecycle import Phase
from rc.projections.timeline import EngineTimes, Timeline, UpdateTimes, VersionCounts, advance_timeline
from rc.versions import WeightIdentity
from tests.core.samples import EVENTS
from tests.core.scenario import ENGINE, Core, healthy, serving, turn, updating


def timeline(core: Core) -> Timeline:
    """Fold all that a core decided."""
    folded = Timeline()
    for _, caused in core.decisions:
        for event in caused:
            folded = advance_timeline(folded, event)
    return folded


def last(core: Core) -> UpdateTimes:
    """Give the update that was requested last."""
    return timeline(core).updates[-1]


def report_taking(core: Core, took_s: float) -> None:
    """Perform the effect that is called for, which takes so many seconds."""
    (effect,) = core.effects
    core.report(msgspec.structs.replace(healthy(effect, core.state), took_s=took_s))


def test_an_update_from_request_to_commit() -> None:
    core = serving()
    core.admit("r1")
    core.admit("r2")
    core.at = 1000.0
    core.update("u1", step=4)
    core.end("r1")
    core.end("r2")
    for took_s in (0.25, 0.0, 0.75, 0.0, 0.0, 0.0):
        report_taking(core, took_s)
    times = EngineTimes(
        engine=ENGINE,
        drain_at=1001.0,
        active_at_drain=2,
        paused_at=1003.75,
        quiesced_at=1004.0,
        begin_update_at=1005.0,
        installed_at=1006.0,
        install_took_s=0.75,
        invalidated_at=1007.0,
        validated_at=1008.0,
        resumed_at=1009.0,
    )
    update = last(core)
    assert update.engines[ENGINE] == times
    assert (update.requested_at, update.ended_at, update.outcome) == (1001.0, 1009.0, "committed")
    assert (update.drain_s, update.gap_s, update.install_s) == (2.75, 5.25, 0.75)
    assert update.active_at_drain == 2
    assert update.identity == WeightIdentity(run="r", step=4)
    assert (update.target, update.path, update.reason) == (1, "one_phase", None)


def test_an_update_in_progress_has_no_gap_yet() -> None:
    update = last(updating(Phase.VALIDATING))
    assert (update.outcome, update.ended_at, update.gap_s) == ("in_progress", None, None)
    assert update.drain_s is not None


def test_an_update_that_drains_has_no_times_but_the_drain() -> None:
    core = serving()
    core.admit("r1")
    core.update("u1")
    update = last(core)
    assert (update.drain_s, update.gap_s, update.install_s, update.active_at_drain) == (None, None, None, 1)


def test_an_abandoned_update_has_a_gap_if_it_had_paused() -> None:
    core = updating(Phase.QUIESCED)
    core.abandon("u1", "its caller was cancelled")
    core.settle()
    update = last(core)
    assert (update.outcome, update.reason) == ("abandoned", "its caller was cancelled")
    assert update.gap_s == 2.0
    assert update.install_s is None


def test_a_tainted_update_ends_with_its_last_member() -> None:
    core = updating(Phase.UPDATING)
    core.report(
        InstallReport(observed=Observation(boot="e-1", label="rc-0", paused=True), mutation="possible", problem="died")
    )
    update = last(core)
    assert (update.outcome, update.reason, update.ended_at) == ("tainted", "install: died", core.at)
    assert update.engines[ENGINE].tainted_at == core.at
    assert update.members == ()
    assert update.gap_s is None


def test_an_install_that_a_successor_found_complete_is_timed_by_the_journal() -> None:
    core = updating(Phase.UPDATING)
    begun_at = core.at
    core.start("c2")
    core.report(LookReport(observed=Observation(boot="e-1", label="rc-1", paused=True), took_s=0.01))
    assert last(core).install_s == core.at - begun_at == 2.0


def test_several_members_take_as_long_as_the_slowest() -> None:
    core = serving("a", "b")
    core.update("u1")
    core.advance(Phase.READY, "a")
    core.advance(Phase.READY, "b")
    update = last(core)
    gaps = {name: times.gap_s for name, times in update.engines.items()}
    assert update.gap_s == max(gap for gap in gaps.values() if gap is not None)
    assert update.drain_s == max(times.drain_s or 0.0 for times in update.engines.values())
    assert update.outcome == "committed"


def test_a_member_that_is_lost_on_the_way_leaves_the_update_in_progress() -> None:
    core = serving("a", "b")
    core.update("u1")
    core.advance(Phase.UPDATING, "a")
    core.advance(Phase.UPDATING, "b")
    core.lose("a")
    update = last(core)
    assert (update.outcome, update.members) == ("in_progress", ("b",))
    assert update.engines["a"].tainted_at is not None
    core.settle()
    assert last(core).outcome == "committed"


def test_a_member_that_restarts_at_the_target_is_no_longer_one() -> None:
    core = serving("a", "b")
    core.update("u1")
    core.advance(Phase.READY, "a")
    core.join("a", boot="a-2")
    assert last(core).members == ("b",)

    assert last(core).engines["a"].tainted_at is None, "lost, not tainted"


def test_the_taint_of_an_engine_that_is_no_member_is_no_part_of_the_update() -> None:
    core = serving("a")
    core.update("u1")
    before = last(core)
    core.join("b", boot="b-1")
    core.join("b", boot="b-1", label="rc-9")
    assert core.state.engine("b").phase is Phase.TAINTED
    assert last(core) == before


def test_a_member_that_is_tainted_before_its_drain_is_recorded_is_no_longer_one() -> None:
    core = serving("a", "b")
    requested, *_ = core.update("u1")
    folded = advance_timeline(Timeline(), requested)
    folded = advance_timeline(folded, events.Tainted(at=1.0, engine="a", reason="in doubt", update="u1"))
    assert folded.updates[0].members == ("b",)
    assert not folded.updates[0].engines


def test_an_update_that_was_abandoned_before_it_paused_had_no_gap() -> None:
    core = updating(Phase.DRAINING)
    core.abandon("u1")
    core.settle()
    assert last(core).engines[ENGINE].resumed_at == core.at
    assert (last(core).gap_s, last(core).drain_s) == (None, None)


def test_an_install_that_has_not_ended_has_no_length() -> None:
    assert last(updating(Phase.UPDATING)).install_s is None


def test_a_taint_outside_an_update_is_no_part_of_the_last_one() -> None:
    core = serving()
    before = last(core)
    core.join(boot="e-1", label="rc-9")
    assert last(core) == before


def test_rollouts_are_counted_by_version() -> None:
    core = serving()
    for n in range(3):
        core.admit(f"r{n}")
    core.end("r0", turn("rc-0", tokens=2), turn("rc-0", tokens=3))
    core.end("r1", turn("rc-0", tokens=4))
    core.abort("r2")
    core.publish("u1", step=1)
    core.admit("r3")
    assert timeline(core).versions == (
        VersionCounts(version=0, admitted=3, finished=2, aborted=1, tokens=9),
        VersionCounts(version=1, admitted=1),
    )


def test_updates_come_in_the_order_of_their_requests_although_a_clock_went_back() -> None:
    core = serving()
    core.publish("z", step=1)
    core.at = 5.0
    core.publish("a", step=2)
    assert [update.update for update in timeline(core).updates] == ["u0", "z", "a"]


STEPS = [event for event in EVENTS if event.kind != "request_update"]


@pytest.mark.parametrize("event", STEPS, ids=lambda event: str(event.kind))
def test_a_timeline_that_begins_in_mid_update_leaves_that_update_out(event: Event) -> None:
    folded = advance_timeline(Timeline(), event)
    assert folded.updates == ()


def test_the_pause_counts_from_when_it_was_asked_for() -> None:
    core = serving()
    core.update("u1")
    drain_at = core.at
    observed = Observation(boot="e-1", label="rc-0", paused=True)
    core.at = drain_at + 9.0
    core.report(PauseReport(observed=observed, took_s=4.0))
    assert last(core).drain_s == 6.0
