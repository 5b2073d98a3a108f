"""The sender's side of an update, with a scripted trainer for vLLM's: what is reported, and that it ends in time."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from rc.effects import transfer, weight_client
from rc.effects.protocol import EngineAdapter, Failed, Ok, Outcome, Refused, Unknown, WeightSource
from rc.effects.transfer import VllmWeightTransfer
from rc.errors import InvalidWeights
from rc.evidence import Observation
from rc.versions import Manifest, ParameterSpec

SPECS = tuple(ParameterSpec(name=name, dtype="float32", shape=(2,)) for name in "abc")

WEIGHTS = cast(WeightSource, SimpleNamespace(manifest=lambda: Manifest(parameters=SPECS)))

Script = Callable[["Trainer"], None]


class Engine:
    """Answers each route as it is told to; everything else is fine."""

    name = "engine"

    def __init__(self) -> None:
        self.boot: str | None = "boot-1"
        self.workers: Outcome[int] = Ok(1)
        self.answers: dict[str, Outcome[None]] = {}
        self.calls: list[str] = []
        self.hangs: str | None = None
        self.given_up: list[str] = []

    async def observe(self) -> Observation:
        return Observation(boot=self.boot)

    async def world_size(self) -> Outcome[int]:
        return self.workers

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Outcome[None]:
        return await self._answer("init")

    async def start_weight_update(self) -> Outcome[None]:
        return await self._answer("start")

    async def update_weights(self, update_info: Any) -> Outcome[None]:
        return await self._answer("update")

    async def finish_weight_update(self, label: str) -> Outcome[None]:
        return await self._answer("finish", f"finish {label}")

    async def _answer(self, step: str, call: str | None = None) -> Outcome[None]:
        self.calls.append(call or step)
        if step == self.hangs:
            try:
                await anyio.sleep(60)
            finally:
                self.given_up.append(step)
        return self.answers.get(step, Ok(None))


class Trainer:
    """Does what vLLM's trainers do, or what a script says."""

    source: Any = None

    def __init__(self, client: Any, script: Script | None) -> None:
        self.client = client
        self.left = False
        self._script = script

    def send_weights(self) -> None:
        if self._script is not None:
            self._script(self)
            return
        self.client.start_weight_update()
        # As vLLM's trainers do, to send while the engine receives: from a thread that no event loop knows.
        with ThreadPoolExecutor(1) as threads:
            threads.submit(self.client.update_weights, {}).result()
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.left = True


class World:
    """A transfer whose trainers are scripted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = Engine()
        self.script: Script | None = None
        self.meet: Callable[[], None] = lambda: None
        self.trainers: list[Trainer] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(transfer, "_load_trainer_side", lambda: None)
        monkeypatch.setattr(transfer, "_vllm_source", lambda weights: weights)
        self.limit(deadline_s=60, rendezvous_s=60)

    def limit(self, deadline_s: float, rendezvous_s: float) -> None:
        self.transfer = VllmWeightTransfer(deadline_s=deadline_s, rendezvous_s=rendezvous_s)
        self._monkeypatch.setattr(self.transfer, "_meet", self._meet)

    def _meet(self, world_size: int, client: Any) -> Trainer:
        assert isinstance(self.engine.workers, Ok)
        assert world_size == 1 + self.engine.workers.value, "the trainer is a rank too"
        self.meet()
        client.init_weight_transfer_engine({})
        self.trainers.append(Trainer(client, self.script))
        return self.trainers[-1]

    async def ready(self) -> str | None:
        return await self.transfer.ready(cast(EngineAdapter, self.engine))

    async def install(self, label: str = "rc-1") -> Any:
        assert await self.ready() is None
        return await self.transfer.install(cast(EngineAdapter, self.engine), WEIGHTS, label)


@pytest.fixture
def anyio_backend() -> str:
    """Trainers work in threads, in real time."""
    return "asyncio"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


# ---------------------------------------------------------------------------------- what is reported


async def test_an_update_whose_every_step_was_acknowledged_is_complete(world: World) -> None:
    report = await world.install("rc-7")
    assert (report.mutation, report.problem) == ("complete", None)
    assert report.sent_bytes == Manifest(parameters=SPECS).nbytes
    assert report.observed.boot == "boot-1"
    assert world.engine.calls == ["init", "start", "update", "finish rc-7"], "the label arrives with the last step"


async def test_nothing_mutated_where_the_engine_refused_to_start(world: World) -> None:
    world.engine.answers["start"] = Refused("no")
    report = await world.install()
    assert (report.mutation, report.problem) == ("none", "start: no")
    assert world.engine.calls[-1] == "start"


async def test_nothing_mutated_where_the_trainer_failed_before_it_started(world: World) -> None:
    world.script = lambda trainer: _raise(RuntimeError("out of memory"))
    report = await world.install()
    assert (report.mutation, report.problem, report.sent_bytes) == ("none", "out of memory", 0)


async def test_nothing_is_sent_without_a_group(world: World) -> None:
    report = await world.transfer.install(cast(EngineAdapter, world.engine), WEIGHTS, "rc-1")
    assert (report.mutation, report.problem) == ("none", "no transfer group was formed")
    assert world.engine.calls == []


@pytest.mark.parametrize("step", ["start", "update", "finish"])
@pytest.mark.parametrize("outcome", [Failed("broke", 500), Unknown("silence")])
async def test_weights_may_have_changed_where_a_step_failed_or_stayed_silent(
    world: World, step: str, outcome: Failed | Unknown
) -> None:
    world.engine.answers[step] = outcome
    report = await world.install()
    assert report.mutation == "possible"
    assert report.problem == f"{step}: {outcome.message}"


@pytest.mark.parametrize(
    ("workers", "may_have_loaded", "update", "mutation"),
    [
        (1, False, Failed("payload refused", 500), "none"),
        (1, True, Failed("payload refused", 500), "possible"),
        (1, None, Failed("payload refused", 500), "possible"),
        (1, False, Unknown("silence"), "possible"),
        (2, False, Failed("payload refused", 500), "possible"),
    ],
    ids=["proved", "sent whole", "trainer cannot say", "worker did not say", "stale replies of a second worker"],
)
async def test_a_failed_update_counts_as_untouched_only_where_that_is_proved(
    world: World, workers: int, may_have_loaded: bool | None, update: Outcome[None], mutation: str
) -> None:
    world.engine.workers = Ok(workers)
    world.engine.answers["update"] = update
    assert await world.ready() is None
    if may_have_loaded is not None:
        vars(world.trainers[0])["may_have_loaded"] = may_have_loaded
    assert (await world.install()).mutation == mutation


# ---------------------------------------------------------------------------------- groups


async def test_a_group_is_formed_once_for_many_updates(world: World) -> None:
    for step in range(3):
        assert (await world.install(f"rc-{step}")).mutation == "complete"
    assert world.engine.calls.count("init") == 1


async def test_a_restarted_engine_is_met_anew_and_the_old_group_left(world: World) -> None:
    await world.install()
    world.engine.boot = "boot-2"
    assert (await world.install()).mutation == "complete"
    old, new = world.trainers
    assert old.left
    assert not new.left


async def test_a_group_that_failed_is_formed_anew(world: World) -> None:
    world.engine.answers["update"] = Failed("broke")
    await world.install()
    world.engine.answers.clear()
    assert (await world.install()).mutation == "complete"
    assert world.engine.calls.count("init") == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no such backend"), "--weight-transfer-config"),
        (ImportError("No module named 'vllm'"), "rolloutcore[engine]"),
        (TimeoutError("ranks [1] have not joined"), "ranks [1] have not joined"),
    ],
)
async def test_a_group_that_cannot_form_is_a_problem_and_not_an_error(
    world: World, error: Exception, said: str
) -> None:
    world.meet = lambda: _raise(error)
    problem = await world.ready()
    assert problem is not None
    assert said in problem
    assert str(error) in problem


async def test_an_engine_that_cannot_be_read_or_does_not_know_its_workers_is_not_ready(world: World) -> None:
    world.engine.workers = Failed("broke")
    assert await world.ready() == "the engine's number of workers is not known: broke"
    world.engine.boot = None
    assert await world.ready() == "the engine cannot be read"


def test_an_unknown_backend_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="no weight-transfer backend 'carrier pigeon'; there are rc_gloo, nccl"):
        VllmWeightTransfer("carrier pigeon")


# ---------------------------------------------------------------------------------- ending in time


class Stuck:
    """A thread that waits for a peer that never comes; calls the engine once it is let go."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self.ended = threading.Event()

    def __call__(self, trainer: Trainer) -> None:
        trainer.client.start_weight_update()
        self._released.wait(30)
        try:
            trainer.client.finish_weight_update()
        finally:
            self.ended.set()

    async def let_go(self) -> None:
        self._released.set()
        await until(self.ended.is_set)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - what it waits for happens in another thread
            await anyio.sleep(0.01)


async def within(limit_s: float, call: Callable[[], Awaitable[Any]]) -> Any:
    with anyio.fail_after(limit_s):
        return await call()


async def test_an_install_ends_at_its_deadline_though_the_trainer_does_not(world: World) -> None:
    world.limit(deadline_s=1, rendezvous_s=60)
    world.script = stuck = Stuck()
    report = await within(20, world.install)
    assert (report.mutation, report.problem) == ("possible", "not done within 1 s")
    await within(20, stuck.let_go)
    assert "finish rc-1" not in world.engine.calls, "a thread that was left behind must not relabel the engine"


async def test_a_trainer_that_does_not_see_that_the_engine_failed_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's nccl trainer, which stays in its broadcast."""
    monkeypatch.setattr(weight_client, "_LAST_WORDS_S", 0.1)
    released = threading.Event()

    def send(trainer: Trainer) -> None:
        trainer.client.start_weight_update()
        threading.Thread(target=lambda: suppressed(trainer.client.update_weights, {}), daemon=True).start()
        released.wait(30)

    world.script = send
    world.engine.answers["update"] = Failed("payload refused", 500)
    report = await within(20, world.install)
    released.set()
    assert (report.mutation, report.problem) == ("possible", "update: payload refused")


async def test_a_rendezvous_that_the_engine_failed_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_client, "_LAST_WORDS_S", 0.1)
    hang = threading.Event()
    world.engine.answers["init"] = Failed("Invalid init_info", 500)

    def meet(world_size: int, client: Any) -> None:
        suppressed(client.init_weight_transfer_engine, {})
        hang.wait(30)

    monkeypatch.setattr(world.transfer, "_meet", meet)
    problem = await within(20, world.ready)
    hang.set()
    assert problem is not None
    assert problem.endswith("init: Invalid init_info")


async def test_a_call_that_is_under_way_at_the_deadline_is_given_up(world: World) -> None:
    world.limit(deadline_s=1, rendezvous_s=60)
    world.engine.hangs = "update"
    report = await within(20, world.install)
    assert report.mutation == "possible"
    await until(lambda: world.engine.given_up == ["update"])
    assert "finish rc-1" not in world.engine.calls


async def test_a_rendezvous_that_hangs_is_a_problem_in_time_and_joins_nothing_later(world: World) -> None:
    world.limit(deadline_s=60, rendezvous_s=0.25)
    hang = threading.Event()
    world.meet = lambda: cast(None, hang.wait(30))
    problem = await within(20, world.ready)
    assert problem is not None
    assert problem.endswith("not done within 0.5 s"), "workers have the rendezvous' time, and as much to report"
    hang.set()
    await anyio.sleep(0.2)
    assert "init" not in world.engine.calls


async def test_a_cancelled_install_calls_the_engine_no_more_and_its_group_is_not_used_again(world: World) -> None:
    world.script = stuck = Stuck()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.install)
        await until(lambda: "start" in world.engine.calls)
        tasks.cancel_scope.cancel()
    await within(20, stuck.let_go)
    assert "finish rc-1" not in world.engine.calls
    world.script = None
    assert (await world.install()).mutation == "complete"
    assert world.engine.calls.count("init") == 2


# ---------------------------------------------------------------------------------- what is sent is what was announced


def tensor(dtype: str = "float32", shape: tuple[int, ...] = (2,)) -> Any:
    return SimpleNamespace(dtype=f"torch.{dtype}", shape=shape)


def test_tensors_that_were_announced_go_out_in_order() -> None:
    assert [name for name, _ in transfer._as_announced(SPECS, [(name, tensor()) for name in "abc"])] == ["a", "b", "c"]
    assert list(transfer._as_announced((), ())) == []


@pytest.mark.parametrize(
    "tensors",
    [
        [("a", tensor()), ("b", tensor())],
        [("a", tensor()), ("b", tensor()), ("c", tensor()), ("d", tensor())],
        [("a", tensor()), ("c", tensor()), ("b", tensor())],
        [("a", tensor()), ("b", tensor()), ("c", tensor("bfloat16"))],
        [("a", tensor()), ("b", tensor()), ("c", tensor(shape=(3,)))],
    ],
    ids=["too few", "too many", "other order", "other dtype", "other shape"],
)
def test_weights_that_differ_from_their_manifest_are_never_sent_whole(tensors: list[tuple[str, Any]]) -> None:
    gone_out: list[tuple[str, Any]] = []
    with pytest.raises(InvalidWeights, match="where their manifest has"):
        gone_out.extend(transfer._as_announced(SPECS, tensors))
    assert len(gone_out) < len(SPECS)


def _raise(error: Exception) -> None:
    raise error


def suppressed(function: Callable[..., object], *arguments: object) -> None:
    with suppress(Exception):
        function(*arguments)
