"""Every call of an update, in every way that it can go wrong: what becomes of the update, the engine and rollouts."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from rc.controller import Controller
from rc.effects.fake import FakeEngine, Fault
from rc.effects.protocol import Failed, Refused, Unknown
from rc.errors import (
    EngineLost,
    EngineTainted,
    GenerationFailed,
    NotAdmitted,
    RolloutCoreError,
    UpdateAbandoned,
    UpdateTainted,
)
from rc.evidence import Observation
from rc.lifecycle import Phase
from tests.controller.world import PROMPT, World, publish

REFUSED, FAILED, UNKNOWN = Refused("no", 400), Failed("boom", 500), Unknown("no answer within 60 s")

FAULTS = {
    "refused": Fault(outcome=REFUSED),
    "failed": Fault(outcome=FAILED),
    "failed halfway": Fault(outcome=FAILED, happens=True),
    "unknown, did not happen": Fault(outcome=UNKNOWN),
    "unknown, happened": Fault(outcome=UNKNOWN, happens=True),
    "died": Fault(dies=True),
    "died, no answer": Fault(outcome=UNKNOWN, dies=True),
}

REFUSED_AT_ONCE, ABANDONED, COMMITTED, TAINTED = "refused at once", "abandoned", "committed", "tainted"


class Expected(msgspec.Struct, frozen=True):
    """How the update ends, and where the engine is when it has."""

    ends: str
    phase: Phase


SAFE = Expected(ABANDONED, Phase.READY)
GONE = Expected(ABANDONED, Phase.ABSENT)
LOST = Expected(REFUSED_AT_ONCE, Phase.ABSENT)
DONE = Expected(COMMITTED, Phase.READY)
OUT = Expected(TAINTED, Phase.TAINTED)

CALLS: dict[tuple[str, int], dict[str, Expected]] = {
    # Before mutation: nothing is lost but the update, or the engine where its process is.
    # The first look finds out whether the engine is still the same; if it finds nothing out, those that follow do.
    ("observe", 1): dict.fromkeys(FAULTS, DONE) | {"died": LOST, "died, no answer": LOST},
    ("pause", 1): dict.fromkeys(FAULTS, SAFE) | {"died": GONE, "died, no answer": GONE},
    # The look after the pause, and the one after preflight: they prove nothing if they fail.
    ("observe", 2): dict.fromkeys(FAULTS, SAFE) | {"died": GONE, "died, no answer": GONE},
    ("observe", 3): dict.fromkeys(FAULTS, SAFE) | {"died": GONE, "died, no answer": GONE},
    # From here on weights may have changed. Only a refusal of the first step proves that they have not.
    ("start_weight_update", 1): dict.fromkeys(FAULTS, OUT) | {"refused": SAFE},
    ("update_weights", 1): dict.fromkeys(FAULTS, OUT),
    # The label is written last, so the label proves it where the answer does not.
    ("finish_weight_update", 1): dict.fromkeys(FAULTS, OUT) | {"failed halfway": DONE, "unknown, happened": DONE},
    ("observe", 4): dict.fromkeys(FAULTS, OUT),
    ("reset_prefix_cache", 1): dict.fromkeys(FAULTS, OUT),
    ("reset_multimodal_cache", 1): dict.fromkeys(FAULTS, OUT),
    ("reset_encoder_cache", 1): dict.fromkeys(FAULTS, OUT),
    ("observe", 5): dict.fromkeys(FAULTS, OUT),
    ("observe", 6): dict.fromkeys(FAULTS, OUT),
    ("resume", 1): dict.fromkeys(FAULTS, OUT) | {"failed halfway": DONE, "unknown, happened": DONE},
    ("observe", 7): dict.fromkeys(FAULTS, OUT),
}

CASES = [
    pytest.param(call, nth, FAULTS[name], expected, id=f"{call} {nth} {name}")
    for (call, nth), rows in CALLS.items()
    for name, expected in rows.items()
]


def script(engine: FakeEngine, call: str, nth: int, fault: Fault) -> None:
    engine.script(call, *[Fault(happens=True)] * (nth - 1), fault)


ERRORS: dict[str, type[RolloutCoreError]] = {
    REFUSED_AT_ONCE: EngineLost,
    ABANDONED: UpdateAbandoned,
    TAINTED: UpdateTainted,
}


async def attempt(control: Controller, expected: Expected) -> None:
    if expected.ends == COMMITTED:
        assert (await publish(control, 1)).version == 1
        return
    with pytest.raises(ERRORS[expected.ends]):
        await publish(control, 1)


def check_never_wrong(world: World) -> None:
    """What a token was sampled with is what its label said; nothing ran on weights in flux or that were not proven."""
    committed = {event.version: event.identity.step for event in world.events("committed")}
    contents = {version: "as loaded" if version == 0 else f"w{number}" for version, number in committed.items()}
    versions = {event.rollout: event.version for event in world.events("admit")}
    for request, content in world.engine.sampled_with:
        assert content == contents[versions[request.rpartition("-")[0]]]


@pytest.mark.parametrize(("call", "nth", "fault", "expected"), CASES)
async def test_a_call_goes_wrong(world: World, call: str, nth: int, fault: Fault, expected: Expected) -> None:
    async with world.open() as control:
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=4)
        script(world.engine, call, nth, fault)
        await attempt(control, expected)

        served = 1 if expected.ends == COMMITTED else 0
        if expected.phase is Phase.READY:
            async with control.rollout() as rollout:
                turn = await rollout.generate(PROMPT, max_tokens=4)
            assert rollout.version == served
            assert {span.label for span in turn.spans} == {f"rc-{served}"}
            assert turn.cached_tokens in ((0,) if served else (16,))
            assert not world.engine.paused
        else:
            error = EngineTainted if expected.phase is Phase.TAINTED else EngineLost
            with pytest.raises(error):
                async with control.rollout():
                    pass
        assert control.state.engine("fake").phase is expected.phase
        assert control.digest == world.digest

        # A tainted engine that lives is left as it is: paused, unless what went wrong came after the resume.
        if expected.phase is Phase.TAINTED and world.engine.alive and (call, nth) != ("observe", 7):
            assert world.engine.paused
        check_never_wrong(world)
        await recover(world, control, expected)
    check_never_wrong(world)


async def recover(world: World, control: Controller, expected: Expected) -> None:
    """Nothing but a restart brings a tainted or lost engine back, and then the next update must succeed."""
    if expected.phase is Phase.READY:
        assert (await publish(control, 2)).version == (2 if expected.ends == COMMITTED else 1)
    else:
        if expected.phase is Phase.TAINTED:
            if world.engine.alive:
                await control.join()
            with pytest.raises(EngineTainted):
                await publish(control, 2)
        world.engine.restart()
        await control.join()
        assert not control.serving
        with pytest.raises(NotAdmitted, match="restarted"):
            async with control.rollout():
                pass
        commit = await publish(control, 2)
        # A number that bytes may have gone out under is not used again.
        assert commit.version == (2 if expected.ends == TAINTED else 1)
    async with control.rollout() as rollout:
        turn = await rollout.generate(PROMPT, max_tokens=4)
    assert {span.label for span in turn.spans} == {rollout.version_label}
    assert turn.cached_tokens == 0


@pytest.mark.parametrize("name", ["refused", "failed", "unknown, did not happen", "died"])
async def test_a_resume_after_an_abandoned_update_goes_wrong(world: World, name: str) -> None:
    """The engine stays paused with the old weights, so it is out of service, but not in doubt."""
    async with world.open() as control:
        world.engine.script("pause", Fault(outcome=FAILED, happens=True))
        world.engine.script("resume", FAULTS[name])
        with pytest.raises(UpdateAbandoned):
            await publish(control, 1)
        with pytest.raises(EngineLost):
            async with control.rollout():
                pass
        assert control.state.engine("fake").phase is Phase.ABSENT
        world.engine.restart()
        await control.join()
        await publish(control, 2)
        assert control.serving


async def open_and_close(world: World) -> None:
    async with world.open():
        pass


async def test_a_pause_that_a_stranger_undid_is_seen(world: World) -> None:
    class Resumed(FakeEngine):
        async def observe(self):  # type: ignore[no-untyped-def]  # a stranger acts between two calls
            if self.calls[-1:] == ["pause"]:
                self.paused = False
            return await super().observe()

    world.engine = Resumed()
    with pytest.raises(UpdateAbandoned, match="not paused"):
        await open_and_close(world)
    assert "begin_update" not in world.kinds
    assert "set_label" not in world.engine.calls


async def test_a_prefix_reset_that_says_no_taints(world: World) -> None:
    class Stubborn(FakeEngine):
        async def reset_prefix_cache(self):  # type: ignore[no-untyped-def]  # answers 200 with success=false
            outcome = await super().reset_prefix_cache()
            return msgspec.structs.replace(outcome, value=False)

    world.engine = Stubborn()
    with pytest.raises(UpdateTainted, match="success=false"):
        await open_and_close(world)
    assert world.engine.paused


async def test_an_engine_that_dies_ends_its_rollouts(world: World) -> None:
    world.engine.token_s = 0.001
    async with world.open() as control:
        failures = []

        async def owner() -> None:
            try:
                async with control.rollout() as rollout:
                    await rollout.generate(PROMPT, max_tokens=1000)
            except GenerationFailed as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(owner)
            await anyio.sleep(0.05)
            world.engine.die()
        assert len(failures) == 5
        assert len(world.events("abort_rollout")) == 5
        assert world.kinds.count("engine_lost") == 1
        assert not control.state.rollouts.active
        with pytest.raises(EngineLost):
            async with control.rollout():
                pass
        with pytest.raises(EngineLost):
            await publish(control, 1)
        world.engine.restart()
        await control.join()
        await publish(control, 1)
        world.engine.token_s = 0.0
        async with control.rollout() as rollout:
            await rollout.generate(PROMPT, max_tokens=1)


async def test_news_of_a_dead_process_does_not_end_the_one_that_took_its_place(world: World) -> None:
    class SlowToTell(FakeEngine):
        telling, told = anyio.Event(), anyio.Event()

        async def observe(self) -> Observation:
            if self.alive:
                return await super().observe()
            self.telling.set()
            await self.told.wait()
            return Observation(gone=True, problem="connection refused")

    engine = world.engine = SlowToTell()
    async with world.open() as control, anyio.create_task_group() as tasks:

        async def owner() -> None:
            with pytest.raises(GenerationFailed):
                async with control.rollout() as rollout:
                    await rollout.generate(PROMPT, max_tokens=1)

        engine.script("generate", Fault(dies=True))
        tasks.start_soon(owner)
        await engine.telling.wait()
        engine.restart()
        await control.join()
        await publish(control, 1)
        engine.told.set()
        await anyio.sleep(0.02)
        assert control.serving
    assert world.kinds.count("engine_lost") == 1


async def test_a_restart_unseen_by_any_request_shows_before_the_new_process_is_paused(world: World) -> None:
    async with world.open() as control:
        world.engine.restart()
        with pytest.raises(EngineLost):
            await publish(control, 1)
        assert control.state.engine("fake").phase is Phase.ABSENT
        assert "restarted" in world.events("engine_lost")[0].reason
        assert not world.engine.paused
        await control.join()
        assert (await publish(control, 1)).version == 1


async def test_a_stranger_who_relabels_the_engine_taints_it(world: World) -> None:
    async with world.open() as control:
        world.engine.label = "step-7"
        with pytest.raises(UpdateTainted, match="step-7"):
            await publish(control, 1)
        assert control.state.engine("fake").phase is Phase.TAINTED
        assert "start_weight_update" not in world.engine.calls
