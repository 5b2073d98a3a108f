"""Leases: a rollout whose owner vanished cannot hold up updates for ever."""

from __future__ import annotations

import anyio
import pytest
from trio.testing import MockClock

from rc.errors import UnknownRollout
from rc.leases import Leases
from tests.controller.world import PROMPT, World, publish


@pytest.fixture
def anyio_backend() -> object:
    """Minutes of virtual time."""
    return "trio", {"clock": MockClock(autojump_threshold=0)}


@pytest.mark.parametrize("lease_s", [0.25, 5.0, 600.0])
async def test_a_rollout_without_a_sign_of_life_is_reaped_when_its_lease_ends(world: World, lease_s: float) -> None:
    async with world.open() as control:
        admitted = control.now()
        async with control.rollout(lease_s=lease_s) as rollout:
            await publish(control, 1)
            assert control.now() - admitted == pytest.approx(lease_s, abs=1.1)
            (aborted,) = world.events("abort_rollout")
            assert "lease" in aborted.reason
            assert aborted.rollout == rollout.id
            with pytest.raises(UnknownRollout):
                await rollout.generate(PROMPT, max_tokens=1)
        assert len(world.events("abort_rollout")) == 1


async def test_a_reaped_rollout_cannot_be_finished(world: World) -> None:
    async with world.open() as control:

        async def owner() -> None:
            async with control.rollout(lease_s=5) as rollout:
                await rollout.generate(PROMPT, max_tokens=1)
                await anyio.sleep(60)

        with pytest.raises(UnknownRollout, match="lease"):
            await owner()
        assert "finish_rollout" not in world.kinds


async def test_a_renewed_lease_lasts_its_full_length_again(world: World) -> None:
    async with world.open() as control, control.rollout(lease_s=10) as rollout:
        for _ in range(10):
            await anyio.sleep(9)
            rollout.renew()
        await rollout.generate(PROMPT, max_tokens=1)
    assert len(world.events("finish_rollout")) == 1


async def test_a_generation_longer_than_the_lease_keeps_it_and_renews_it(world: World) -> None:
    world.engine.token_s = 10.0
    async with world.open() as control, control.rollout(lease_s=60) as rollout:
        await rollout.generate(PROMPT, max_tokens=30)
        await anyio.sleep(50)
        await rollout.generate(PROMPT, max_tokens=7)
        await anyio.sleep(50)
    assert len(world.events("finish_rollout")) == 1


async def test_the_lease_runs_again_after_a_long_generation(world: World) -> None:
    world.engine.token_s = 10.0
    async with world.open() as control:

        async def owner() -> None:
            async with control.rollout(lease_s=60) as rollout:
                await rollout.generate(PROMPT, max_tokens=30)
                await anyio.sleep(63)

        with pytest.raises(UnknownRollout):
            await owner()
        assert len(world.events("abort_rollout")) == 1
        assert not control.state.rollouts.active


async def test_two_generations_at_once_both_hold_the_lease(world: World) -> None:
    world.engine.token_s = 10.0
    async with world.open() as control, control.rollout(lease_s=15) as rollout, anyio.create_task_group() as tasks:

        async def turn(tokens: int) -> None:
            await rollout.generate(PROMPT, max_tokens=tokens)

        tasks.start_soon(turn, 1)
        tasks.start_soon(turn, 20)
    assert len(world.events("finish_rollout")) == 1


async def test_ten_thousand_leases_cost_nothing_until_they_are_due() -> None:
    leases = Leases()
    for number in range(10_000):
        leases.start(f"r{number}", 600.0, float(number))
    assert leases.overdue(599.0) == ()
    assert leases.overdue(601.0) == ("r0", "r1")
    leases.renew("r2", 602.0)
    leases.end("r3")
    assert leases.overdue(604.0) == ("r4",)
    assert leases.next_deadline() == 605.0
    with leases.held("r5"):
        assert leases.overdue(606.0) == ("r6",)
    assert "r5" in leases.overdue(10_000_000.0)
