"""A crash after every event of a history, in every state of the engine: what the next opening makes of it."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from typing import Any, Literal

import anyio
import msgspec
import pytest
from trio.testing import MockClock

from rc.effects.fake import Fault
from rc.effects.protocol import Failed
from rc.errors import EngineTainted, EngineUnreachable, EngineUnsuitable, NotAdmitted, UpdateAbandoned, UpdateTainted
from rc.events.journal import Record
from rc.lifecycle import Phase
from rc.replay import replay
from tests.controller.traced import CrashPoint, TracedEngine, TracedStore, copy_of, whole_decisions
from tests.controller.world import PROMPT, World, now, publish, until


@pytest.fixture
def anyio_backend() -> object:
    return "trio", {"clock": MockClock(autojump_threshold=0)}


# ------------------------------------------------------------------------------------------------------------ histories


async def updates_with_rollouts(world: World) -> None:
    """Rollouts, an update that drains one, one that is abandoned, another one, and a rollout that nobody ends."""
    world.engine.token_s = 0.001
    async with world.open() as control, anyio.create_task_group() as tasks:
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=2)
        async with control.rollout() as rollout:
            tasks.start_soon(publish, control, 1)
            await until(lambda: control.state.engine("fake").phase is Phase.DRAINING)
            await rollout.generate(PROMPT, max_tokens=2)
        await until(lambda: control.published is not None and control.published.version == 1)
        world.engine.script("pause", Fault(outcome=Failed("busy"), happens=True))
        with pytest.raises(UpdateAbandoned):
            await publish(control, 2)
        async with control.rollout(), control.rollout():
            pass
        await publish(control, 3)
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=2)


async def a_taint_and_a_restart(world: World) -> None:
    """An install that fails, and the way back from it."""
    async with world.open() as control:
        world.engine.script("update_weights", Fault(outcome=Failed("worker failed")))
        with pytest.raises(UpdateTainted):
            await publish(control, 1)
        world.engine.restart()
        await control.join()
        await publish(control, 2)


HISTORIES = {"updates with rollouts": updates_with_rollouts, "a taint and a restart": a_taint_and_a_restart}


@cache
def history(name: str) -> tuple[tuple[Record, ...], tuple[CrashPoint, ...]]:
    """Run a history once and give its records and the crash points at which no decision is cut in two."""
    engine = TracedEngine()
    world = World(engine)
    store = TracedStore(engine)
    world.store = store
    anyio.run(HISTORIES[name], world, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
    whole = whole_decisions(store.records)
    return tuple(store.records), tuple(point for point in store.points if point.seq in whole)


POINTS = [
    pytest.param(name, number, id=f"{name}-{point.seq}-{number}")
    for name in HISTORIES
    for number, point in enumerate(history(name)[1])
]

# --------------------------------------------------------------------------------------------------------- expectations


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    phase: Literal["READY", "TAINTED", "JOINED"]
    version: int | None


def expected(records: tuple[Record, ...], point: CrashPoint) -> Expected:
    """What must come of it, told from the journal's text and the engine alone."""
    published: int | None = None
    serves = False
    body: dict[str, Any] = {}
    last, path, target = "", "", -1
    for record in records[: point.seq]:
        body = json.loads(record.body)
        match record.kind:
            case "committed":
                published, serves = body["version"], True
            case "engine_joined" | "engine_lost":
                serves = False
            case "request_update":
                path, target = body["path"], body["target"]
            case "controller_started" | "admit" | "finish_rollout" | "abort_rollout":
                continue
        last = record.kind
    home = Expected(phase="READY" if serves else "JOINED", version=published)
    if published is None:  # what the engine loaded is adopted
        home = Expected(phase="READY", version=0)
    complete = point.engine.label == f"rc-{target}" and point.engine.paused
    match last:
        case "tainted":
            # A restart since then is a new process, to which nothing was published yet.
            restarted = point.engine.label == "default" and not point.engine.paused and point.engine.boot > 1
            return Expected(phase="JOINED" if restarted else "TAINTED", version=published)
        case "begin_update" if complete:
            return Expected(phase="READY", version=target)
        case "begin_update":
            return home if path == "adopt" else Expected(phase="TAINTED", version=published)
        case "installed" | "invalidated" | "validated":
            return Expected(phase="READY", version=target)
    return home


def ends(records: list[Record]) -> tuple[Counter[str], Counter[str]]:
    admitted = Counter(json.loads(record.body)["rollout"] for record in records if record.kind == "admit")
    ended = Counter(
        json.loads(record.body)["rollout"] for record in records if record.kind in ("finish_rollout", "abort_rollout")
    )
    return admitted, ended


# ---------------------------------------------------------------------------------------------------------------- tests


def test_the_histories_pass_through_every_phase() -> None:
    kinds = {record.kind for name in HISTORIES for record in history(name)[0]}
    assert {"update_abandoned", "tainted", "engine_lost", "committed", "abort_rollout", "finish_rollout"} <= kinds
    points = [point for name in HISTORIES for point in history(name)[1]]
    assert any(point.engine.content == "in flux" for point in points)
    assert any(point.engine.label == "rc-1" and point.engine.paused for point in points)
    assert len(points) > 60


@pytest.mark.parametrize(("name", "number"), POINTS)
async def test_the_next_opening_settles_it(name: str, number: int) -> None:
    records, points = history(name)
    point = points[number]
    world = World(point.engine.engine())
    world.store = copy_of(list(records), point.seq)
    want = expected(records, point)

    async with world.open() as control:
        assert control.state.engine("fake").phase.name == want.phase
        assert control.published is None if want.version is None else control.published is not None
        assert control.published is None or control.published.version == want.version
        assert control.serving == (want.phase == "READY")
        assert not control.state.rollouts.active
        admitted, ended = ends(world.records)
        assert admitted == ended
        if want.phase == "READY":
            assert not world.engine.paused
            assert world.engine.label == f"rc-{want.version}"
            async with control.rollout() as rollout:
                turn = await rollout.generate(PROMPT, max_tokens=2)
            assert {span.label for span in turn.spans} == {f"rc-{want.version}"}
            assert world.engine.content == content_of(records, want.version)
        elif want.phase == "TAINTED":
            assert world.engine.paused == point.engine.paused
            assert {"resume", "start_weight_update", "set_label"}.isdisjoint(world.engine.calls)
            with pytest.raises(EngineTainted):
                await publish(control, 50)
            world.engine.restart()
            await control.join()
        else:
            with pytest.raises(NotAdmitted, match="restarted"):
                async with control.rollout():
                    pass
        commit = await publish(control, 60)
        begun = {json.loads(record.body)["target"] for record in records[: point.seq] if record.kind == "begin_update"}
        assert commit.version >= max(begun, default=-1)
        if want.phase == "TAINTED":
            assert commit.version > max(begun)
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=2)
        assert world.engine.sampled_with[-1][1] == "w60"
    result = replay(world.records)
    assert result.problems == ()
    assert result.digest == world.digest == control.digest


def content_of(records: tuple[Record, ...], version: int | None) -> str:
    """What a version holds, by the identity that the whole history committed it with."""
    commits = [json.loads(record.body) for record in records if record.kind == "committed"]
    (step,) = [body["identity"]["step"] for body in commits if body["version"] == version]
    return f"w{step}" if version else "as loaded"


@pytest.mark.parametrize(("name", "number"), POINTS)
async def test_with_an_engine_that_was_restarted_meanwhile_nothing_is_served_until_an_update(
    name: str, number: int
) -> None:
    records, points = history(name)
    point = points[number]
    engine = point.engine.engine()
    engine.restart()
    world = World(engine)
    world.store = copy_of(list(records), point.seq)
    fresh = "committed" not in {record.kind for record in records[: point.seq]}
    async with world.open() as control:
        assert control.serving == fresh
        commit = await publish(control, 60)
        begun = {json.loads(record.body)["target"] for record in records[: point.seq] if record.kind == "begin_update"}
        assert commit.version >= max(begun, default=-1)
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=2)
        assert {content for _, content in engine.sampled_with} == {"w60"}
    assert replay(world.records).problems == ()


@pytest.mark.parametrize(("name", "number"), POINTS[::5])
async def test_without_an_engine_the_journal_stays_as_it_is(name: str, number: int) -> None:
    records, points = history(name)
    point = points[number]
    world = World(point.engine.engine())
    world.engine.die()
    world.store = copy_of(list(records), point.seq)
    with pytest.raises(EngineUnreachable):
        async with world.open():
            pass
    assert len(world.records) == point.seq


@pytest.mark.parametrize(("name", "number"), POINTS)
async def test_an_engine_that_cannot_be_read_at_first_changes_nothing_and_does_not_hang(name: str, number: int) -> None:
    """The probe answers, the look does not: opening fails at once, and the next opening finds all as it was."""
    records, points = history(name)
    point = points[number]
    world = World(point.engine.engine())
    world.store = copy_of(list(records), point.seq)
    world.engine.script("observe", Fault(outcome=Failed("busy")))
    started = now()
    with pytest.raises(EngineUnreachable):
        async with world.open():
            pass
    assert now() - started < 1.0
    want = expected(records, point)
    async with world.open() as control:
        assert control.state.engine("fake").phase.name == want.phase
    assert replay(world.records).problems == ()


async def test_a_restarted_engine_that_cannot_join_is_refused_and_the_old_one_is_on_record_as_lost(
    world: World,
) -> None:
    async with world.open() as control:
        await publish(control, 1)
    world.engine.restart()
    world.engine.paused = True
    with pytest.raises(EngineUnsuitable, match="is paused, and not by this controller"):
        async with world.open():
            pytest.fail("it was opened")
    world.engine.paused = False
    async with world.open() as control:
        assert control.state.engine("fake").phase is Phase.JOINED


@pytest.mark.parametrize("last", ["installed", "invalidated", "validated", "update_abandoned"])
async def test_an_engine_that_a_stranger_relabelled_meanwhile_is_not_resumed(last: str) -> None:
    """Resuming is an effect that may be repeated, but not on weights that are not the ones that were validated."""
    records, points = history("updates with rollouts")
    seq = max(number for number, record in enumerate(records, start=1) if record.kind == last)
    (point, *_) = [point for point in points if point.seq == seq and point.engine.paused]
    engine = msgspec.structs.replace(point.engine, label="step-9", content="strange").engine()
    world = World(engine)
    world.store = copy_of(list(records), seq)
    async with world.open() as control:
        assert control.state.engine("fake").phase is Phase.TAINTED
        assert "step-9" in world.events("tainted")[-1].reason
        assert engine.paused
        assert "resume" not in engine.calls
