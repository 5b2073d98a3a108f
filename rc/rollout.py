"""A rollout as its owner holds it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from rc.effects.protocol import EngineAdapter, Failed, GenerateRequest, Generation, Ok, Outcome, Refused, Unknown
from rc.errors import GenerationFailed, InvalidTrajectory, PromptTooLong
from rc.events.types import Turn
from rc.projections.rollouts import ActiveRollout
from rc.versions import version_label

__all__ = ("Rollout",)


class _Owner(Protocol):
    """What a rollout needs from its controller."""

    def now(self) -> float: ...

    def check_active(self, rollout: str) -> None: ...

    def renew(self, rollout: str) -> None: ...

    def lease_held(self, rollout: str) -> AbstractContextManager[None]: ...

    async def end_rollout(self, rollout: str, turns: tuple[Turn, ...]) -> None: ...

    async def engine_failed(self, engine: str) -> None: ...


class Rollout:
    """A rollout bound to one committed version on one engine.

    Use `generate`, as often as the rollout has turns; leaving the ``async with`` block records the trajectory. Or drive
    the `engine` with a client of your own, under `version`, and hand the result to `finish`.
    """

    def __init__(self, owner: _Owner, active: ActiveRollout, engine: EngineAdapter, max_model_len: int) -> None:
        self._owner = owner
        self._active = active
        self._engine = engine
        self._max_model_len = max_model_len
        self._turns: list[Turn] = []
        self._sent = 0
        self._ended = False

    @property
    def id(self) -> str:
        """Its id in the journal."""
        return self._active.rollout

    @property
    def version(self) -> int:
        """The committed version that it is bound to."""
        return self._active.version

    @property
    def version_label(self) -> str:
        """The version as the engine attests it, e.g. ``"rc-7"``; also the ``cache_salt`` for a client of your own."""
        return version_label(self._active.version)

    @property
    def engine(self) -> str:
        """Name of the engine, which is its URL unless another was given."""
        return self._active.engine

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was generated so far."""
        return tuple(self._turns)

    @property
    def ended(self) -> bool:
        """Whether the rollout was finished."""
        return self._ended

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        **sampling: Any,
    ) -> Turn:
        """Sample one completion from the engine at this rollout's version.

        Args:
            prompt_token_ids: Exact tokens of the prompt, earlier turns included.
            max_tokens: Most tokens to sample.
            temperature: Sampling temperature; 0 is greedy.
            **sampling: Further sampling parameters by vLLM's names, e.g. ``top_p=0.9``, ``stop_token_ids=[2]``.

        Returns:
            The turn: tokens, logprobs, and the engine's attestation of the version. It is part of the trajectory.

        Raises:
            PromptTooLong, InvalidTrajectory: Before anything is sent.
            UnknownRollout: The rollout has ended, e.g. because its lease ran out.
            GenerationFailed: The engine did not return a completion.
        """
        self._owner.check_active(self.id)
        prompt = _token_ids(prompt_token_ids)
        if not prompt:
            raise InvalidTrajectory("the prompt is empty; pass at least one token id")
        if max_tokens < 1:
            raise InvalidTrajectory(f"max_tokens must be at least 1, not {max_tokens}")
        if self._max_model_len and len(prompt) + max_tokens > self._max_model_len:
            raise PromptTooLong(len(prompt), max_tokens, self._max_model_len)
        _check_sampling(sampling)
        request = GenerateRequest(
            request=f"{self.id}-{self._sent}",
            prompt_token_ids=prompt,
            sampling={"max_tokens": max_tokens, "temperature": temperature, **sampling},
            cache_salt=self.version_label,
        )
        self._sent += 1
        started_at = self._owner.now()
        try:
            with self._owner.lease_held(self.id):
                generation = await self._generation(await self._engine.generate(request))
        finally:
            self.renew()
        turn = Turn(
            prompt_token_ids=prompt,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            spans=generation.spans,
            finish_reason=generation.finish_reason,
            sampling=request.sampling,
            cached_tokens=generation.cached_tokens,
            request=request.request,
            started_at=started_at,
            finished_at=self._owner.now(),
        )
        self._turns.append(turn)
        return turn

    async def _generation(self, outcome: Outcome[Generation]) -> Generation:
        match outcome:
            case Ok(generation) if generation.finish_reason == "abort":
                raise GenerationFailed(f"engine {self.engine} aborted the request; generated tokens were discarded")
            case Ok(generation):
                return generation
            case Refused(message) | Failed(message):
                await self._owner.engine_failed(self.engine)
                raise GenerationFailed(f"engine {self.engine} did not generate: {message}")
            case Unknown(message):
                await self._owner.engine_failed(self.engine)
                raise GenerationFailed(f"engine {self.engine} gave no usable answer: {message}")

    def renew(self) -> None:
        """Extend the lease by its full length from now; `generate` does so by itself."""
        self._owner.renew(self.id)

    async def finish(self, turns: Sequence[Turn] | None = None) -> None:
        """Record the trajectory; leaving the block does so by itself where `generate` was used.

        Args:
            turns: What a client of your own sent and received. Default: what `generate` returned.

        Raises:
            InvalidTrajectory: Tokens, logprobs or spans do not fit together; nothing was recorded.
            VersionMismatch: The engine attested another version; the rollout was aborted and the engine tainted.
            UnknownRollout: The rollout has already ended.
        """
        given = self.turns if turns is None else tuple(turns)
        await self._owner.end_rollout(self.id, given)
        self._turns = list(given)
        self._ended = True


def _token_ids(tokens: Iterable[Any]) -> tuple[int, ...]:
    """Take token ids from a list, an array or a tensor."""
    try:
        return tuple(map(operator.index, tokens))
    except TypeError as error:
        raise InvalidTrajectory(f"the prompt must be a flat sequence of integer token ids: {error}") from error


def _check_sampling(sampling: dict[str, Any]) -> None:
    """Refuse what could be neither sent nor recorded, before a generation is spent on it."""
    try:
        msgspec.json.encode(sampling)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidTrajectory(f"the sampling parameters {sorted(sampling)} are not plain data: {error}") from error
