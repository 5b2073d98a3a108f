"""What `Controller.open` uses where its caller gives nothing else."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from rc.effects.protocol import EngineAdapter, EngineFacts, WeightTransfer
from rc.errors import EngineUnsuitable
from rc.versions import Manifest
from rc.weights import checkpoint_manifest

__all__ = ("adapter_for", "check_suitable", "default_transfer", "manifest_at", "monotone_clock", "random_id")


def monotone_clock() -> Callable[[], float]:
    """The system's time at the start, advanced by the monotonic clock: it never goes backwards within a controller."""
    started, monotonic_start = time.time(), time.monotonic()
    return lambda: started + (time.monotonic() - monotonic_start)


def random_id(prefix: str) -> str:
    """Make an id that no other is equal to."""
    return f"{prefix}-{secrets.token_hex(6)}"


def adapter_for(engine: str | EngineAdapter, api_key: str | None) -> EngineAdapter:
    """Give the adapter for a URL, or the one that was given. aiohttp is imported only where it is needed."""
    if not isinstance(engine, str):
        return engine
    from rc.effects.vllm_http import VllmHttpEngine

    return VllmHttpEngine(engine, api_key=api_key)


def default_transfer() -> WeightTransfer:
    """Give vLLM's weight transfer over rc's own backend."""
    from rc.effects.transfer import VllmWeightTransfer

    return VllmWeightTransfer()


def check_suitable(engine: str, facts: EngineFacts) -> None:
    """Raise `EngineUnsuitable` where the probe found something missing."""
    if facts.missing:
        missing = "\n  ".join(facts.missing)
        raise EngineUnsuitable(f"engine {engine} (vLLM {facts.vllm}) cannot be driven:\n  {missing}")


def manifest_at(root: str) -> Manifest | None:
    """The parameters of the checkpoint that the engine loaded, where it lies on this machine."""
    return checkpoint_manifest(root) if Path(root).is_dir() else None
