"""What effect handlers need from an engine and from a weight transfer, whatever stands behind them.

Every call that leaves the process has a deadline and ends in one of four outcomes. The distinction that matters is
whether the engine's state may have changed: a refusal proves that it did not, a timeout proves nothing.
"""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import msgspec

from rc.events.types import Span
from rc.evidence import InstallReport, Observation
from rc.versions import Manifest

__all__ = (
    "EngineAdapter",
    "EngineFacts",
    "Failed",
    "GenerateRequest",
    "Generation",
    "Ok",
    "Outcome",
    "Refused",
    "Unknown",
    "WeightSource",
    "WeightTransfer",
)

T = TypeVar("T")


class Ok(msgspec.Struct, Generic[T], frozen=True):
    """The engine did it and said so."""

    value: T


class Refused(msgspec.Struct, frozen=True):
    """It certainly did not happen: the engine rejected the call, or the call never reached it.

    ``status`` is the HTTP status, or None where there was no answer because there was no connection.
    """

    message: str
    status: int | None = None


class Failed(msgspec.Struct, frozen=True):
    """The engine tried and reported a failure; its state may have changed."""

    message: str
    status: int | None = None


class Unknown(msgspec.Struct, frozen=True):
    """No answer before the deadline, or a connection that broke while waiting: it may or may not have happened."""

    message: str


Outcome = Ok[T] | Refused | Failed | Unknown


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe found out about an engine.

    Attributes:
        vllm: Version of the vLLM that answers.
        model: Name under which it serves the model.
        model_root: Where the engine loaded the model from, as it says.
        max_model_len: Its context, in tokens.
        profile: How rc drives it: ``"stock"`` for an unmodified vLLM's dev-mode routes.
        missing: What rc needs and did not find, each with what to do about it; empty if it is suitable.
        exposed: What is unsafe about how it is exposed, for `rc doctor`.
    """

    vllm: str
    model: str
    model_root: str
    max_model_len: int
    profile: str
    missing: tuple[str, ...] = ()
    exposed: tuple[str, ...] = ()


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: exact tokens in, sampling parameters by vLLM's names, and the version it must run under."""

    request: str
    prompt_token_ids: tuple[int, ...]
    sampling: dict[str, Any]
    cache_salt: str


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine returned for one request; fields as in `rc.events.types.Turn`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]
    finish_reason: str | None
    cached_tokens: int | None


class EngineAdapter(Protocol):
    """One engine. Calls never raise for what the engine does; they return an `Outcome` or an `Observation`."""

    @property
    def name(self) -> str:
        """The engine's name in the journal."""
        ...

    async def probe(self) -> EngineFacts:
        """Find out what answers and what it can do.

        Raises:
            EngineUnreachable: Nothing answers, or it is not a vLLM.
        """
        ...

    async def observe(self) -> Observation:
        """Read boot, label and pause state, in this order, without changing anything."""
        ...

    async def pause(self) -> Outcome[None]:
        """Stop generating; whatever is in flight is aborted, caches are left alone."""
        ...

    async def resume(self) -> Outcome[None]:
        """Generate again."""
        ...

    async def reset_prefix_cache(self) -> Outcome[bool]:
        """Reset the prefix cache; the value is the engine's own word on whether it did."""
        ...

    async def reset_multimodal_cache(self) -> Outcome[None]:
        """Reset the multimodal processor caches."""
        ...

    async def reset_encoder_cache(self) -> Outcome[None]:
        """Reset the encoder cache."""
        ...

    async def set_label(self, label: str) -> Outcome[None]:
        """Attest this weight version from now on; changes no weights."""
        ...

    async def generate(self, request: GenerateRequest) -> Outcome[Generation]:
        """Sample one completion."""
        ...

    async def aclose(self) -> None:
        """Release connections."""
        ...


class WeightSource(Protocol):
    """The weights of one update, on the trainer's side."""

    def manifest(self) -> Manifest:
        """Names, dtypes and shapes of what would be sent."""
        ...

    def optional(self) -> frozenset[str]:
        """Names that are sent although the engine's checkpoint may not list them (a tied ``lm_head.weight``)."""
        ...

    def problems(self) -> tuple[str, ...]:
        """What is wrong with the values (NaN, infinity), each naming its tensor; empty if nothing is."""
        ...


class WeightTransfer(Protocol):
    """Moves an update's weights into a paused engine and applies them under a label."""

    @property
    def backend(self) -> str:
        """Name of vLLM's weight-transfer backend."""
        ...

    async def ready(self, engine: EngineAdapter) -> str | None:
        """Check and prepare all that can be before anything mutates (rendezvous, group); say what is wrong, or None."""
        ...

    async def install(self, engine: EngineAdapter, weights: WeightSource, label: str) -> InstallReport:
        """Send and apply; never raises for what the engine or the network does. Returns within its own deadline."""
        ...
