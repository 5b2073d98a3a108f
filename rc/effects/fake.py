"""A fake engine and a fake transfer, in memory: for fast tests and for simulating faults, never for a claim about vLLM.

The fake keeps what matters of vLLM's behaviour: requests queue while it is paused, pausing aborts what is in flight, a
label is whatever was written last, a restart forgets it, cached prefixes outlive a weight change unless they are reset,
and a call can take effect although its answer is lost. `Fault` scripts any call.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import anyio
import msgspec

from rc.effects.protocol import (
    EngineAdapter,
    EngineFacts,
    Failed,
    GenerateRequest,
    Generation,
    Ok,
    Outcome,
    Refused,
    Unknown,
    WeightSource,
)
from rc.errors import EngineUnreachable
from rc.events.types import Span
from rc.evidence import InstallReport, Observation
from rc.versions import Manifest, ParameterSpec

__all__ = ("FakeEngine", "FakeTransfer", "FakeWeights", "Fault")

T = TypeVar("T")

_BLOCK_TOKENS = 16
"""Prompt tokens per cached block, as in vLLM."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong with one call.

    Attributes:
        outcome: What the caller gets instead of the real outcome; None leaves it.
        happens: Whether the call takes effect all the same.
        delay_s: Extra time before it takes effect.
        dies: Whether the engine's process dies at this call.
    """

    outcome: Refused | Failed | Unknown | None = None
    happens: bool = False
    delay_s: float = 0.0
    dies: bool = False


class FakeWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that are nothing but a name; two names generate different tokens."""

    content: str
    parameters: tuple[ParameterSpec, ...] = (ParameterSpec(name="w", dtype="bfloat16", shape=(2, 2)),)
    wrong: tuple[str, ...] = ()

    def manifest(self) -> Manifest:
        """Its one parameter, unless others were given."""
        return Manifest.of(self.parameters)

    def optional(self) -> frozenset[str]:
        """None."""
        return frozenset()

    def problems(self) -> tuple[str, ...]:
        """What the test says is wrong."""
        return self.wrong


class FakeEngine:
    """An engine in memory.

    Args:
        name: Its name in the journal.
        token_s: Seconds to sample one token.
        control_s: Seconds that each control call takes.
    """

    def __init__(self, name: str = "fake", *, token_s: float = 0.0, control_s: float = 0.0) -> None:
        self._name = name
        self.token_s = token_s
        self.control_s = control_s
        self.max_model_len = 1024
        self.model_root = ""
        self.alive = True
        self.boot = 1
        self.label = "default"
        self.paused = False
        self.updating = False
        self.content = "as loaded"
        self.calls: list[str] = []
        self.sampled_with: list[tuple[str, str]] = []
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)
        self._cached: dict[tuple[str, tuple[int, ...]], str] = {}
        self._resumed = anyio.Event()
        self._abort_epoch = 0

    @property
    def name(self) -> str:
        """Its name in the journal."""
        return self._name

    def script(self, call: str, *faults: Fault) -> None:
        """Let the next calls of that name go wrong, one fault a call."""
        self._faults[call].extend(faults)

    def die(self) -> None:
        """End the process: nothing listens any more, in-flight requests break."""
        self.alive = False
        self._wake()

    def restart(self) -> None:
        """Start a new process with the weights of the checkpoint and no label."""
        self.alive, self.boot = True, self.boot + 1
        self.label, self.paused, self.updating, self.content = "default", False, False, "as loaded"
        self._cached.clear()
        self._wake()

    def _wake(self) -> None:
        self._resumed.set()
        self._resumed = anyio.Event()

    # ------------------------------------------------------------------ the adapter protocol

    async def aclose(self) -> None:
        """Nothing to release."""

    async def probe(self) -> EngineFacts:
        """Describe it.

        Raises:
            EngineUnreachable: If it is dead.
        """
        if not self.alive:
            raise EngineUnreachable(f"no vLLM answers at {self.name}: it is dead")
        return EngineFacts(
            vllm="fake", model="policy", model_root=self.model_root, max_model_len=self.max_model_len, profile="fake"
        )

    async def observe(self) -> Observation:
        """Give label, pause state and boot."""
        outcome = await self._call("observe", lambda: None)
        if not isinstance(outcome, Ok):
            return Observation(gone=not self.alive, problem=outcome.message)
        return Observation(boot=str(self.boot), label=self.label, paused=self.paused)

    async def pause(self) -> Outcome[None]:
        """Abort what is in flight and queue what comes."""

        def effect() -> None:
            self.paused = True
            self._abort_epoch += 1

        return await self._call("pause", effect)

    async def resume(self) -> Outcome[None]:
        """Generate again."""

        def effect() -> None:
            self.paused = False
            self._wake()

        return await self._call("resume", effect)

    async def reset_prefix_cache(self) -> Outcome[bool]:
        """Forget cached prefixes."""

        def effect() -> bool:
            self._cached.clear()
            return True

        return await self._call("reset_prefix_cache", effect)

    async def reset_multimodal_cache(self) -> Outcome[None]:
        """Forget nothing: there is none."""
        return await self._call("reset_multimodal_cache", lambda: None)

    async def reset_encoder_cache(self) -> Outcome[None]:
        """Forget nothing: there is none."""
        return await self._call("reset_encoder_cache", lambda: None)

    async def set_label(self, label: str) -> Outcome[None]:
        """Attest this label."""

        def effect() -> None:
            self.label = label

        return await self._call("set_label", effect)

    async def generate(self, request: GenerateRequest) -> Outcome[Generation]:
        """Sample tokens that depend on the weights and the prompt alone, one after the other."""
        outcome = await self._call("generate", lambda: None)
        if not isinstance(outcome, Ok):
            return outcome
        boot = self.boot
        while self.paused and self._runs(boot):
            await self._resumed.wait()
        aborted_by = self._abort_epoch
        key = (request.cache_salt, request.prompt_token_ids)
        hit = key in self._cached
        computed_with = self._cached.setdefault(key, self.content)
        tokens: list[int] = []
        spans: list[tuple[str, int]] = []
        finish_reason = "length"
        for position in range(int(request.sampling["max_tokens"])):
            await anyio.sleep(self.token_s)
            if not self._runs(boot):
                return Unknown("/inference/v1/generate: the connection broke while waiting")
            if self._abort_epoch != aborted_by:
                finish_reason = "abort"
                break
            tokens.append(_token(computed_with, request.prompt_token_ids, position))
            self.sampled_with.append((request.request, self.content))
            if not spans or spans[-1][0] != self.label:
                spans.append((self.label, position))
        ends = [start for _, start in spans[1:]] + [len(tokens)]
        return Ok(
            Generation(
                token_ids=tuple(tokens),
                logprobs=(-0.5,) * len(tokens),
                spans=tuple(
                    Span(label=label, start=start, end=end) for (label, start), end in zip(spans, ends, strict=False)
                ),
                finish_reason=finish_reason,
                cached_tokens=len(request.prompt_token_ids) // _BLOCK_TOKENS * _BLOCK_TOKENS if hit else 0,
            )
        )

    # ------------------------------------------------------------------ weight update routes

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Outcome[None]:
        """Join a transfer group; there is none to join."""
        return await self._call("init_weight_transfer_engine", lambda: None)

    async def shutdown_weight_transfer_engine(self) -> Outcome[None]:
        """Leave it."""
        return await self._call("shutdown_weight_transfer_engine", lambda: None)

    async def start_weight_update(self) -> Outcome[None]:
        """Put the weights in flux."""

        def effect() -> None:
            if self.updating:
                raise _OutOfOrderError("start_weight_update while an update is active")
            self.updating, self.content = True, "in flux"

        return await self._call("start_weight_update", effect)

    async def update_weights(self, content: str) -> Outcome[None]:
        """Take in the weights."""

        def effect() -> None:
            if not self.updating:
                raise _OutOfOrderError("update_weights without start_weight_update")
            self.content = content

        return await self._call("update_weights", effect)

    async def finish_weight_update(self, label: str) -> Outcome[None]:
        """End the update and attest ``label``."""

        def effect() -> None:
            if not self.updating:
                raise _OutOfOrderError("finish_weight_update without start_weight_update")
            self.updating, self.label = False, label

        return await self._call("finish_weight_update", effect)

    async def _call(self, call: str, effect: Callable[[], T]) -> Outcome[T]:
        self.calls.append(call)
        fault = self._faults[call].popleft() if self._faults[call] else Fault(happens=True)
        boot = self.boot
        reached = self.alive
        await anyio.sleep(self.control_s + fault.delay_s)
        if fault.dies:
            self.die()
        if not reached:
            return Refused(f"/{call} could not be reached: connection refused")
        if not self._runs(boot):
            return fault.outcome or Unknown(f"/{call}: the connection broke while waiting")
        try:
            value = effect() if fault.outcome is None or fault.happens else None
        except _OutOfOrderError as error:
            return Failed(str(error), 500)
        return fault.outcome or Ok(cast(T, value))

    def _runs(self, boot: int) -> bool:
        return self.alive and self.boot == boot


class _OutOfOrderError(Exception):
    """A weight update route that was called when vLLM would answer 500."""


class FakeTransfer:
    """Installs `FakeWeights` into a `FakeEngine` by vLLM's three calls, so that each can be made to fail."""

    backend = "fake"

    def __init__(self, *, problem: str | None = None) -> None:
        self.problem = problem

    async def ready(self, engine: EngineAdapter) -> str | None:
        """Give the problem that the test set, if any."""
        return self.problem

    async def install(self, engine: EngineAdapter, weights: WeightSource, label: str) -> InstallReport:
        """Start, update, finish; stop at the first that does not succeed."""
        if not isinstance(engine, FakeEngine) or not isinstance(weights, FakeWeights):
            raise TypeError("a FakeTransfer installs FakeWeights into a FakeEngine, nothing else")
        started = anyio.current_time()
        steps = (
            ("start", engine.start_weight_update),
            ("update", lambda: engine.update_weights(weights.content)),
            ("finish", lambda: engine.finish_weight_update(label)),
        )
        mutation: Literal["none", "possible", "complete"] = "complete"
        problem = None
        for step, call in steps:
            outcome = await call()
            if not isinstance(outcome, Ok):
                mutation = "none" if step == "start" and isinstance(outcome, Refused) else "possible"
                problem = f"{step}: {outcome.message}"
                break
        return InstallReport(
            observed=await engine.observe(),
            took_s=anyio.current_time() - started,
            problem=problem,
            mutation=mutation,
            sent_bytes=weights.manifest().nbytes,
        )


def _token(content: str, prompt: tuple[int, ...], position: int) -> int:
    digest = hashlib.sha256(f"{content} {prompt} {position}".encode()).digest()
    return int.from_bytes(digest[:2], "big") % 1000
