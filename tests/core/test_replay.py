"""Replay proves a journal, and finds whatever does not hold in it."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from rc.events.journal import Decision, Head, Record, chain_records, encode_decision, genesis_hash
from rc.events.types import Committed, Drain
from rc.evidence import InstallReport, Observation
from rc.lifecycle import Phase
from rc.projections.control import CHECKPOINTS, ControlState, evolve, state_digest
from rc.replay import Problem, Replayer, recovery_plan, replay
from tests.core.scenario import FLIGHT, Core, serving, updating


def recorded(core: Core) -> list[Record]:
    """Lay what a core decided out as a journal would."""
    head, state, records = Head(seq=0, hash=genesis_hash("test")), ControlState(), list[Record]()
    for command, caused in core.decisions:
        digests: list[str | None] = []
        for event in caused:
            state = evolve(state, event)
            digests.append(state_digest(state) if event.kind in CHECKPOINTS else None)
        decision = Decision(command=command, events=caused, digests=tuple(digests))
        records += chain_records(head, state.epoch, encode_decision(decision))
        head = Head(seq=records[-1].seq, hash=records[-1].hash)
    return records


def a_run() -> Core:
    """Two versions, an abandoned update, a crash, a taint and a restart."""
    core = serving()
    core.admit("r1")
    core.admit("r2")
    core.end("r1")
    core.abort("r2")
    core.publish("u1", step=1)
    core.update("u2", step=2)
    core.abandon("u2")
    core.settle()
    core.admit("r3")
    core.start("c2")
    core.update("u3", step=3)
    core.advance(Phase.UPDATING)
    core.report(InstallReport(observed=Observation(), mutation="possible", problem="sender died"))
    core.join(boot="e-2")
    core.publish("u4", step=4)
    core.admit("r4")
    return core


CORE = a_run()
RECORDS = recorded(CORE)


def changed(position: int, **fields: object) -> list[Record]:
    """Give the records with one of them changed."""
    return [msgspec.structs.replace(r, **fields) if n == position else r for n, r in enumerate(RECORDS)]


def the(kind: str) -> int:
    """Position of the first record of a kind."""
    return next(n for n, record in enumerate(RECORDS) if record.kind == kind)


def test_a_good_journal_replays_to_the_live_state_without_a_problem() -> None:
    found = replay(RECORDS)
    assert found.problems == ()
    assert found.state == CORE.state
    assert found.digest == state_digest(CORE.state)
    assert found.seq == len(RECORDS) == sum(found.kinds.values())
    assert found.kinds == dict(Counter(record.kind for record in RECORDS))
    assert found.decisions_rerun == len(CORE.decisions)
    assert found.digests_checked == sum(record.kind in CHECKPOINTS for record in RECORDS) > 5
    assert list(found.state.rollouts.active) == ["r4"]


def test_the_last_commit_is_named_with_its_place() -> None:
    found = replay(RECORDS)
    assert found.last_commit is not None
    seq, published = found.last_commit
    assert published == CORE.state.published
    event = RECORDS[seq - 1].event
    assert isinstance(event, Committed)
    assert event.version == published.version == 3


def test_an_empty_journal_replays_to_nothing() -> None:
    found = replay([])
    assert (found.seq, found.state, found.problems, found.last_commit) == (0, ControlState(), (), None)


@pytest.mark.parametrize("at", range(len(RECORDS) + 1))
def test_any_place_can_be_replayed_to(at: int) -> None:
    found = replay(iter(RECORDS), at)
    state = ControlState()
    for record in RECORDS[:at]:
        state = evolve(state, record.event)
    assert (found.seq, found.problems) == (at, ())
    assert found.digest == state_digest(state)


def test_a_replayer_takes_records_one_by_one() -> None:
    replayer = Replayer()
    for record in RECORDS:
        replayer.apply(record)
    assert replayer.result() == replay(RECORDS)


# ------------------------------------------------------------------------------------------------------------ problems


def test_an_event_that_was_not_decided_is_a_problem_and_replay_goes_on() -> None:
    position = the("admit")
    body = RECORDS[position].body.replace('"lease_s":60.0', '"lease_s":61.0')
    found = replay(changed(position, body=body))
    first = found.problems[0]
    assert first.seq == position + 1
    assert first.what.startswith('its command, decided again, causes {"kind":"admit"')
    assert found.seq == len(RECORDS)


def test_a_stored_digest_that_is_not_met_is_a_problem() -> None:
    position = the("committed")
    found = replay(changed(position, state_digest="0" * 64))
    (problem,) = found.problems
    assert problem.seq == position + 1
    assert "not 0000" in problem.what


def test_a_digest_is_checked_wherever_one_is_stored() -> None:
    found = replay(changed(the("drain"), state_digest="0" * 64))
    assert [problem.seq for problem in found.problems] == [the("drain") + 1]


def test_a_checkpoint_without_a_digest_is_a_problem() -> None:
    found = replay(changed(the("tainted"), state_digest=None))
    assert found.problems == (Problem(seq=the("tainted") + 1, what="a tainted without a state digest"),)


def test_a_missing_record_is_a_problem() -> None:
    position = the("quiesced")
    found = replay([record for n, record in enumerate(RECORDS) if n != position])
    assert found.problems[0] == Problem(seq=position + 2, what=f"record {position + 1} is missing")
    assert found.seq == len(RECORDS)


def test_an_event_that_does_not_fold_is_a_problem() -> None:
    position = the("installed")
    other = RECORDS[the("validated")]
    found = replay(changed(position, kind=other.kind, body=other.body))
    assert found.problems[1].seq == position + 1
    assert "validated is not allowed while engine e is UPDATING" in found.problems[1].what


def test_an_event_of_a_newer_kind_is_a_problem() -> None:
    found = replay(changed(the("drain"), kind="staged"))
    assert any("unknown event kind 'staged'" in problem.what for problem in found.problems)


def test_a_command_that_cannot_be_read_is_a_problem() -> None:
    found = replay(changed(the("admit"), command='{"command":"fly"}'))
    assert found.problems == (Problem(seq=the("admit") + 1, what=found.problems[0].what),)
    assert found.problems[0].what.startswith("a recorded command cannot be read")


def test_a_command_that_is_refused_now_is_a_problem() -> None:
    command = RECORDS[the("admit")].command
    assert command is not None
    found = replay(changed(the("admit"), command=command.replace("60.0", "-1.0")))
    assert found.problems[0].what.startswith("its command, decided again, is refused: a lease must be longer")


def test_an_event_too_many_is_a_problem() -> None:
    position = the("admit")
    late = msgspec.structs.replace(RECORDS[position + 1], command=None)
    records = [late if n == position + 1 else record for n, record in enumerate(RECORDS)]
    found = replay(records)
    assert found.problems == (Problem(seq=position + 2, what="its command, decided again, causes no admit here"),)


def test_a_decision_cut_short_is_a_problem_once_another_begins() -> None:
    position = the("request_update")
    early = msgspec.structs.replace(RECORDS[position + 2], seq=position + 2)
    found = replay([*RECORDS[: position + 1], early])
    assert found.problems[0] == Problem(seq=position + 2, what="the decision before lacks 1 events: drain, ...")


def test_only_the_first_problems_are_kept_and_the_others_counted() -> None:
    core = serving()
    for n in range(120):
        core.admit(f"r{n}")
    records = [msgspec.structs.replace(record, body=record.body.replace("60.0", "61.0")) for record in recorded(core)]
    found = replay(records)
    assert (len(found.problems), found.problems_left_out) == (100, 20)


def test_an_event_of_an_older_schema_is_held_to_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drain, "schema", 2)
    current = recorded(CORE)
    position = the("drain")
    upcast = replay([*current[:position], msgspec.structs.replace(current[position], schema=1)])
    assert [problem.what for problem in upcast.problems] == [
        'its command, decided again, causes {"kind":"drain","at":103.0,"update":"u0","engine":"e","active":0}, not '
        '{"kind":"drain","at":103.0,"update":"u0","engine":"e","active":0}',
        "drain has schema version 1, and nothing converts it to 2",
    ]


# ------------------------------------------------------------------------------------------------------------ recovery


def test_an_empty_journal_recovers_nothing() -> None:
    assert recovery_plan(ControlState()) == ("start afresh: no engine has joined",)


def test_unfinished_rollouts_are_named_up_to_a_few() -> None:
    core = serving()
    for n in range(7):
        core.admit(f"r{n}")
    first, _ = recovery_plan(core.state)
    assert first == "abort 7 unfinished rollout(s): r0, r1, r2, r3, r4, ..."


PLANS = {
    Phase.DRAINING: ("look at it", "u1 is abandoned, nothing was mutated, back to 'rc-0'", "another label: TAINTED"),
    Phase.QUIESCED: ("look at it", "u1 is abandoned, nothing was mutated, back to 'rc-0'", "another label: TAINTED"),
    Phase.UPDATING: ("look at it", "attesting 'rc-1': go on to the commit of rc-1", "anything else: TAINTED"),
    Phase.INVALIDATING: ("reset its caches again", "go on to the commit of rc-1", "if evidence fails, TAINTED"),
    Phase.VALIDATING: ("validate it again", "go on to the commit of rc-1", "if evidence fails, TAINTED"),
    Phase.RESUMING: ("resume it again", "go on to the commit of rc-1", "if evidence fails, TAINTED"),
}


@pytest.mark.parametrize("phase", FLIGHT)
def test_the_plan_for_a_phase_in_flight_says_what_is_done_and_what_may_come_of_it(phase: Phase) -> None:
    (line,) = recovery_plan(updating(phase).state)
    assert line.startswith(f"engine e ({phase.name}): ")
    for part in PLANS[phase]:
        assert part in line
    mutating = phase not in (Phase.DRAINING, Phase.QUIESCED)
    assert ("rc-1 is never used again" in line) is mutating


def test_the_plan_for_an_adoption_says_that_nothing_is_mutated_by_it() -> None:
    core = Core()
    core.join()
    assert recovery_plan(core.state) == (
        "engine e (JOINED): look at it; it serves nothing until an update commits to it, so what it loaded is adopted "
        "as rc-0",
    )
    core.update("u0", path="adopt")
    core.advance(Phase.UPDATING)
    (line,) = recovery_plan(core.state)
    assert "still 'default': back to 'default', nothing was mutated" in line


def test_the_plan_for_an_abandoned_update_goes_back() -> None:
    core = updating(Phase.QUIESCED)
    core.abandon("u1")
    assert recovery_plan(core.state) == (
        "engine e (RESUMING): resume it again, back to 'rc-0'; if it does not show that, it counts as lost",
    )


def test_the_plan_for_settled_engines() -> None:
    core = serving("a", "b", "c", "d")
    core.join("a", boot="a-1", label="rc-9")
    core.lose("b")
    core.join("d", boot="d-2")
    lines = recovery_plan(core.state)
    assert [line.partition(":")[0] for line in lines] == [
        "engine a (TAINTED)",
        "engine b (ABSENT)",
        "engine c (READY)",
        "engine d (JOINED)",
    ]
    assert "attests 'rc-9' where rc left 'rc-0'" in lines[0]
    assert "attesting 'rc-0' and not paused, goes on serving" in lines[2]
    assert "adopted" not in lines[3]


@pytest.mark.parametrize("phase", FLIGHT)
def test_opening_does_what_the_plan_says(phase: Phase) -> None:
    core = updating(phase)
    (line,) = recovery_plan(core.state)
    core.start("c2")
    if "look at it" in line:
        core.step()
    core.settle()
    published = core.state.published
    assert published is not None
    expected = {True: 1, False: 0}["go on to the commit" in line and "look at it" not in line]
    if phase is Phase.UPDATING:
        assert core.phase() is Phase.TAINTED, "the look shows the old label"
    else:
        assert (core.phase(), published.version) == (Phase.READY, expected)
