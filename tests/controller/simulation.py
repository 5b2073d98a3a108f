"""A trainer's life in miniature, with everything going wrong, decided by one seed.

The first half has faults: calls that are refused, fail, or lose their answer; an engine that dies and is restarted;
strangers who relabel it; owners who vanish; controllers that crash and leave calls behind which still arrive. The
second half heals: with nothing going wrong any more, an update and rollouts must succeed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from math import inf
from typing import TypeVar

import anyio

from rc.controller import Controller
from rc.effects.fake import FakeEngine, FakeTransfer, Fault
from rc.effects.protocol import Failed, GenerateRequest, Generation, Outcome, Refused, Unknown
from rc.errors import JournalClosed, RolloutCoreError
from rc.events.memory import MemoryJournal, MemoryStore
from rc.events.types import Span, Turn
from rc.lifecycle import Phase
from rc.rollout import Rollout
from rc.updates import WhenBusy
from tests.controller.traced import copy_of
from tests.controller.world import now, step, weights

T = TypeVar("T")
Act = Callable[[Controller], Awaitable[None]]

TROUBLE_S = 10.0
"""How long things go wrong."""

HEALING_S = 600.0
"""How long healing may take: longer than every deadline and lease of the simulation together."""

GENERATE_DEADLINE_S = 5.0
"""As the HTTP adapter has one: a request that hangs, in an engine that a stranger paused, ends."""

MUTATING = frozenset({"start_weight_update", "update_weights", "finish_weight_update", "set_label"})


class Life:
    """One controller, from its opening to its close or crash."""

    def __init__(self) -> None:
        self.crashed = False
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()


current_life: ContextVar[Life] = ContextVar("current_life")


class SimEngine(FakeEngine):
    """Draws a fault for each call while there is trouble. What a crashed controller has sent still arrives."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__("engine", token_s=0.02, control_s=0.01)
        self.trouble = True
        self.resumed_by: Life | None = None
        self.violations: list[str] = []
        self._rng = rng
        self._acting: list[Life] = []

    async def _call(self, call: str, effect: Callable[[], T]) -> Outcome[T]:
        caller = current_life.get()
        if caller.crashed:
            await anyio.sleep_forever()
        if self.trouble and self._rng.random() < 0.04:
            self.script(call, self._fault())
        if call in ("observe", "generate"):
            return await super()._call(call, effect)
        if caller in self._acting:
            self.violations.append(f"{call} while another call of the same controller is outstanding")
        self._acting.append(caller)
        try:
            return await self._act(call, effect, caller)
        finally:
            self._acting.remove(caller)

    async def _act(self, call: str, effect: Callable[[], T], caller: Life) -> Outcome[T]:

        def watched() -> T:
            if call == "resume":
                self.resumed_by = caller
            if call in MUTATING and not self.paused and self.resumed_by is caller and not caller.crashed:
                self.violations.append(f"{call} while it generates")
            return effect()

        return await super()._call(call, watched)

    def _fault(self) -> Fault:
        outcome = self._rng.choice([None, Refused("no", 400), Failed("boom", 500), Unknown("lost")])
        return Fault(
            outcome=outcome,
            happens=not isinstance(outcome, Refused) and self._rng.random() < 0.5,
            delay_s=self._rng.choice([0.0, 0.0, 0.5]),
            dies=self._rng.random() < 0.1,
        )

    async def generate(self, request: GenerateRequest) -> Outcome[Generation]:
        with anyio.move_on_after(GENERATE_DEADLINE_S):
            return await super().generate(request)
        return Unknown(f"no answer within {GENERATE_DEADLINE_S:g} s")

    def stranger_resumes(self) -> None:
        self.resumed_by, self.paused = None, False
        self._wake()

    def calm(self) -> None:
        self.trouble = False
        self._faults.clear()


class Oops(Exception):
    """An owner's own error."""


class Simulation:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = SimEngine(self.rng)
        self.store = MemoryStore()
        self.finished: set[str] = set()
        """Rollouts whose owners were told that they are on record."""
        self.committed: set[tuple[int, int]] = set()
        """Versions and steps whose trainers were told that they are published."""
        self.met: Counter[str] = Counter()
        self.digest = ""
        self._step = 0
        self._id = 0

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            ends = anyio.current_time() + TROUBLE_S
            while anyio.current_time() < ends:
                life = Life()
                tasks.start_soon(self._live, life, self._work)
                with anyio.move_on_after(self.rng.uniform(0.1, 6.0)):
                    await life.ended.wait()
                await self._end(life)
            self.engine.calm()
            with anyio.fail_after(HEALING_S):
                await anyio.sleep(2 * GENERATE_DEADLINE_S)
                self.met["healed"] += await self._heal(tasks)
            tasks.cancel_scope.cancel()

    async def _end(self, life: Life) -> None:
        if life.ended.is_set():
            return
        if self.rng.random() < 0.7:
            life.crashed = True
            self.store = copy_of(self.store.records, len(self.store.records))
            self.met[f"crashed after {self.store.records[-1].kind}" if self.store.records else "crashed at once"] += 1
            life.scope.cancel()
        else:
            self.met["closed"] += 1
            life.scope.cancel()
            await life.ended.wait()

    async def _live(self, life: Life, work: Act) -> None:
        current_life.set(life)
        try:
            with life.scope:
                async with (
                    MemoryJournal.open(self.store, controller="sim") as journal,
                    Controller.open(
                        journal, engine=self.engine, transfer=FakeTransfer(), clock=now, new_id=self._new_id
                    ) as control,
                ):
                    await work(control)
        except RolloutCoreError as error:
            self.met[f"opening or closing: {type(error).__name__}"] += 1
            if self.rng.random() < 0.8 or not self.engine.trouble:
                self.engine.restart()
        finally:
            life.ended.set()

    def _new_id(self, prefix: str) -> str:
        self._id += 1
        return f"{prefix}-{self._id}"

    # --------------------------------------------------------------------------------------------------------- trouble

    async def _work(self, control: Controller) -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(self._repeat, self._own_a_rollout, control, 0.3)
            for _ in range(2):
                tasks.start_soon(self._repeat, self._publish, control, 1.0)
            tasks.start_soon(self._repeat, self._meddle, control, 3.0)

    async def _repeat(self, act: Act, control: Controller, pause_s: float) -> None:
        while True:
            try:
                await act(control)
            except Oops:
                self.met["Oops"] += 1
            except JournalClosed:
                return
            except RolloutCoreError as error:
                self.met[type(error).__name__] += 1
                await anyio.sleep(0.5)
            await anyio.sleep(self.rng.uniform(0.0, pause_s))

    def _patience_s(self, most_s: float) -> float:
        return self.rng.uniform(0.0, most_s) if self.rng.random() < 0.3 else inf

    async def _own_a_rollout(self, control: Controller) -> None:
        rng, lease_s = self.rng, self.rng.choice([1.0, 2.0, 30.0])
        with anyio.move_on_after(self._patience_s(2.0)):
            async with control.rollout(lease_s=lease_s) as rollout:
                for _ in range(rng.randint(0, 3)):
                    await rollout.generate((rng.randint(1, 3),) * 20, max_tokens=rng.randint(1, 4))
                    await anyio.sleep(rng.uniform(0.0, 0.3))
                await self._something_odd(rollout, lease_s)
            if rollout.ended and not current_life.get().crashed:
                self.finished.add(rollout.id)

    async def _something_odd(self, rollout: Rollout, lease_s: float) -> None:
        chance = self.rng.random()
        if chance < 0.05:
            await anyio.sleep(min(lease_s, 3.0) + 1.1)
        elif chance < 0.1:
            raise Oops
        elif chance < 0.11:
            span = Span(label="step-9", start=0, end=1)
            await rollout.finish([Turn(prompt_token_ids=(1,), token_ids=(2,), spans=(span,))])

    async def _publish(self, control: Controller) -> None:
        self._step += 1
        number = self._step
        with anyio.move_on_after(self._patience_s(0.5)):
            when_busy: WhenBusy = "queue" if self.rng.random() < 0.5 else "refuse"
            commit = await control.update(step(number), weights(number), when_busy=when_busy)
            if not current_life.get().crashed:
                self.committed.add((commit.version, number))

    async def _meddle(self, control: Controller) -> None:
        chance = self.rng.random()
        if not self.engine.alive or not control.serving:
            if chance < 0.8:
                self.engine.restart()
                await control.join()
        elif chance < 0.1:
            self.engine.die()
        elif chance < 0.2:
            self.engine.restart()
        elif chance < 0.25:
            self.engine.label = "step-9"
        elif chance < 0.3:
            self.engine.paused = True
        elif chance < 0.35:
            self.engine.stranger_resumes()

    # --------------------------------------------------------------------------------------------------------- healing

    async def _heal(self, tasks: anyio.abc.TaskGroup) -> int:
        for _ in range(5):
            life = Life()
            tasks.start_soon(self._live, life, self._recover)
            await life.ended.wait()
            if self.digest:
                return 1
        return 0

    async def _recover(self, control: Controller) -> None:
        if not self.engine.alive or control.state.engine("engine").phase in (Phase.TAINTED, Phase.ABSENT):
            self.engine.restart()
            await control.join()
        self._step += 1
        commit = await control.update(step(self._step), weights(self._step))
        self.committed.add((commit.version, self._step))
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(self._one_good_rollout, control)
        self.digest = control.digest

    async def _one_good_rollout(self, control: Controller) -> None:
        async with control.rollout() as rollout:
            await rollout.generate((1,) * 20, max_tokens=5)
        self.finished.add(rollout.id)
