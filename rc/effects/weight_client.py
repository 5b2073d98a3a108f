"""The calls that vLLM's trainer side makes, from its threads into the event loop and through an engine's adapter.

Whoever waits for the trainer can see how far it got, stop waiting, and bar it from the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from rc.effects.protocol import Failed, Ok, Outcome, Refused, Unknown

__all__ = ("WeightClient", "WeightRoutes")

T = TypeVar("T")

_LAST_WORDS_S: Final = 3.0
"""How long a trainer may go on once the engine has failed one of its calls. vLLM's nccl trainer would wait for a peer
that never comes; that of ``rc_gloo`` ends by itself and says more."""


class WeightRoutes(Protocol):
    """vLLM's weight-update routes, as `rc.effects.vllm_http.VllmHttpEngine` has them."""

    async def world_size(self) -> Outcome[int]:
        """Give the number of worker ranks that take part."""
        ...

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Outcome[None]:
        """Have every worker join the transfer group."""
        ...

    async def start_weight_update(self) -> Outcome[None]:
        """Open an update; with vLLM's own backends, weights are in flux from here on."""
        ...

    async def update_weights(self, update_info: Any) -> Outcome[None]:
        """Receive weights; answers when the sender has sent."""
        ...

    async def finish_weight_update(self, label: str) -> Outcome[None]:
        """Close the update and attest ``label`` from then on."""
        ...


class _RouteFailed(Exception):
    """A route did not succeed; ends the trainer's work in its thread."""


class WeightClient:
    """vLLM's ``VLLMWeightSyncClient`` (structural) over an engine's routes, for threads; remembers every outcome."""

    def __init__(self, routes: WeightRoutes, token: object) -> None:
        self.label = ""
        self.outcomes: dict[str, Outcome[None]] = {}
        self._routes = routes
        self._token = token
        self._barred = False
        self._under_way: set[anyio.CancelScope] = set()
        self._waiting: anyio.CancelScope | None = None

    async def work(self, deadline_s: float, function: Callable[..., T], *arguments: Any) -> T:
        """Run a trainer's function in a thread, and wait for it.

        Raises:
            TimeoutError: The deadline passed, or the function went on after the engine had failed a call of it. The
                thread is left behind; the message says which.
        """
        self.outcomes = {}
        with anyio.move_on_after(deadline_s) as self._waiting:
            return await anyio.to_thread.run_sync(function, *arguments, abandon_on_cancel=True)
        raise TimeoutError(self._failure() or f"not done within {deadline_s:g} s")

    def _failure(self) -> str | None:
        for step, outcome in tuple(self.outcomes.items()):
            if isinstance(outcome, Failed | Refused):
                return f"{step}: {outcome.message}"
        return None

    def bar(self) -> None:
        """Let no call of a thread that was left behind reach the engine, and end those that are under way."""
        self._barred = True
        for scope in tuple(self._under_way):
            scope.cancel()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `WeightRoutes`, as for each of these; raises where the outcome is not ok."""
        self._call("init", partial(self._routes.init_weight_transfer_engine, init_info))

    def start_weight_update(self) -> None:
        """See `WeightRoutes`."""
        self._call("start", self._routes.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        """See `WeightRoutes`."""
        self._call("update", partial(self._routes.update_weights, update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `WeightRoutes`; vLLM's own trainers pass no version, and ``label`` is it then."""
        self._call("finish", partial(self._routes.finish_weight_update, weight_version or self.label))

    def _call(self, step: str, route: Callable[[], Awaitable[Outcome[None]]]) -> None:
        # Noted before the bar is looked at: who bars and then reads the outcomes sees every call that may get through.
        self.outcomes[step] = Unknown("the call was under way")
        outcome = anyio.from_thread.run(self._run, step, route, token=cast(Any, self._token))
        if outcome is None:
            raise _RouteFailed(f"{step}: the install was given up")
        if not isinstance(outcome, Ok):
            raise _RouteFailed(f"{step}: {outcome.message}")

    async def _run(self, step: str, route: Callable[[], Awaitable[Outcome[None]]]) -> Outcome[None] | None:
        """Make the call in the event loop, where `bar` is called too; None if it was barred before or in between."""
        if self._barred:
            return None
        with anyio.CancelScope() as scope:
            self._under_way.add(scope)
            try:
                outcome = self.outcomes[step] = await route()
            finally:
                self._under_way.discard(scope)
            if self._waiting is not None and not isinstance(outcome, Ok):
                self._waiting.deadline = min(self._waiting.deadline, anyio.current_time() + _LAST_WORDS_S)
            return outcome
        return None
