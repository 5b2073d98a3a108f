"""Leaving the controller, at any moment and by any exception: the journal is in order, the engine serves or is out."""

from __future__ import annotations

import random

import anyio
import anyio.lowlevel
import pytest
from trio.testing import MockClock

from rc.controller import CLOSE_DEADLINE_S, Controller
from rc.effects.fake import Fault
from rc.errors import EngineTainted, JournalClosed, RolloutCoreError, UpdateAbandoned
from rc.lifecycle import Phase
from rc.replay import replay
from tests.controller.world import World, busy_life, now, publish, until

# ----------------------------------------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize(
    "error", [ValueError("mine"), KeyboardInterrupt("mine"), SystemExit("mine"), UpdateAbandoned("mine", "t", "r")]
)
async def test_an_exception_of_the_body_comes_out_as_itself(world: World, error: BaseException) -> None:
    async def body() -> None:
        async with world.open():
            raise error

    with pytest.raises(type(error), match="mine") as caught:
        await body()
    assert caught.value is error
    assert world.phase() is Phase.READY


async def test_exceptions_of_parallel_rollouts_come_out_as_their_group(world: World) -> None:
    async def owner(control: Controller) -> None:
        async with control.rollout():
            await anyio.lowlevel.checkpoint()
            raise ValueError("mine")

    async def body() -> None:
        async with world.open() as control, anyio.create_task_group() as tasks:
            tasks.start_soon(owner, control)

    with pytest.raises(ExceptionGroup) as caught:
        await body()
    assert caught.group_contains(ValueError)
    assert not world.folded().rollouts.active


async def test_after_it_closed_a_controller_refuses_everything(world: World) -> None:
    async with world.open() as control:
        pass
    for call in (lambda: publish(control, 1), lambda: control.rollout().__aenter__(), control.join):
        with pytest.raises(JournalClosed, match="clos"):
            await call()
    assert control.digest == world.digest


# ---------------------------------------------------------------------------------------------------- what is under way


async def test_closing_aborts_rollouts_and_abandons_an_update_that_drains(world: World) -> None:
    outcomes: list[BaseException] = []

    async def owner(control: Controller) -> None:
        try:
            async with control.rollout():
                await anyio.sleep(0.5)
        except RolloutCoreError as error:
            outcomes.append(error)

    async def update(control: Controller) -> None:
        try:
            await publish(control, 1)
        except RolloutCoreError as error:
            outcomes.append(error)

    async with anyio.create_task_group() as tasks, world.open() as control:
        tasks.start_soon(owner, control)
        await until(lambda: bool(control.state.rollouts.active))
        tasks.start_soon(update, control)
        await until(lambda: control.state.update is not None)
        tasks.start_soon(update, control)
        await anyio.sleep(0.01)
    assert [event.reason for event in world.events("abort_rollout")] == ["its controller was closed"]
    assert world.events("update_abandoned")[0].reason == "its controller was closed"
    assert world.phase() is Phase.READY
    assert not world.engine.paused
    assert {type(error) for error in outcomes} == {UpdateAbandoned, JournalClosed}


async def test_closing_waits_for_an_update_that_mutates(world: World) -> None:
    commits = []

    async def update(control: Controller) -> None:
        commits.append(await publish(control, 1))

    async with anyio.create_task_group() as tasks, world.open() as control:
        world.engine.control_s = 0.02
        tasks.start_soon(update, control)
        await until(lambda: control.state.engine("fake").phase is Phase.UPDATING)
    assert [commit.version for commit in commits] == [1]
    assert world.kinds[-1] == "committed"


class TestHanging:
    @pytest.fixture
    def anyio_backend(self) -> object:
        return "trio", {"clock": MockClock(autojump_threshold=0)}

    async def test_closing_does_not_wait_for_ever(self, world: World) -> None:
        """The engine stays paused and the journal says that it is mutating: the next opening decides."""
        outcomes: list[BaseException] = []

        async def update(control: Controller) -> None:
            try:
                await publish(control, 1)
            except RolloutCoreError as error:
                outcomes.append(error)

        async with anyio.create_task_group() as tasks:
            async with world.open() as control:
                world.engine.script("update_weights", Fault(happens=True, delay_s=1e6))
                tasks.start_soon(update, control)
                await until(lambda: control.state.engine("fake").phase is Phase.UPDATING)
                closing = now()
            assert now() - closing == pytest.approx(CLOSE_DEADLINE_S, abs=1.0)
        assert [type(error) for error in outcomes] == [JournalClosed]
        assert world.kinds[-1] == "begin_update"
        assert world.engine.paused
        async with world.open() as control:
            with pytest.raises(EngineTainted):
                await publish(control, 2)

    async def test_those_who_wait_for_admission_are_let_go(self, world: World) -> None:
        outcomes: list[BaseException] = []

        async def owner(control: Controller) -> None:
            try:
                async with control.rollout():
                    pass
            except RolloutCoreError as error:
                outcomes.append(error)

        async with anyio.create_task_group() as tasks, world.open() as control:
            world.engine.script("start_weight_update", Fault(happens=True, delay_s=1e6))
            with anyio.move_on_after(5):
                await publish(control, 1)
            tasks.start_soon(owner, control)
            await anyio.sleep(1)
        assert [type(error) for error in outcomes] == [JournalClosed]


# --------------------------------------------------------------------------------------------------- at a random moment


@pytest.mark.parametrize("seed", range(30))
async def test_closed_at_any_moment_the_journal_reopens_and_the_next_update_works(world: World, seed: int) -> None:
    rng = random.Random(seed)
    world.engine.token_s, world.engine.control_s = 0.0005, 0.0005
    for _ in range(3):
        with anyio.move_on_after(rng.uniform(0.0, 0.05)):
            async with world.open() as control:
                await busy_life(control)
        state = world.folded()
        assert not state.rollouts.active
        assert state.update is None
        assert state.engine("fake").phase in (Phase.READY, Phase.JOINED, Phase.ABSENT)
        assert not world.engine.paused
    async with world.open() as control:
        await publish(control, 5000)
        assert control.digest == world.digest
    assert replay(world.records).problems == ()
