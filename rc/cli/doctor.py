"""``rc doctor``: look at an engine before trusting it."""

from __future__ import annotations

import argparse

import anyio
import msgspec

from rc.effects.protocol import EngineFacts
from rc.evidence import Observation
from rc.exit_codes import ExitCode

__all__ = ("doctor",)


def doctor(arguments: argparse.Namespace) -> ExitCode:
    """Probe an engine and print what was found."""
    facts, observed = anyio.run(_probe, arguments.engine, arguments.api_key)
    if arguments.json:
        report = {"engine": arguments.engine, "facts": facts, "observed": observed, "suitable": not facts.missing}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        _print(arguments.engine, facts, observed)
    return ExitCode.FOUND_PROBLEMS if facts.missing else ExitCode.OK


async def _probe(url: str, api_key: str | None) -> tuple[EngineFacts, Observation]:
    from rc.effects.vllm_http import VllmHttpEngine

    engine = VllmHttpEngine(url, api_key=api_key)
    try:
        return await engine.probe(), await engine.observe()
    finally:
        await engine.aclose()


def _print(url: str, facts: EngineFacts, observed: Observation) -> None:
    print(f"{url}: vLLM {facts.vllm}, driven by the {facts.profile} profile")
    print(
        f"  model        {facts.model} from {facts.model_root or 'an unknown place'}, "
        f"{facts.max_model_len} tokens of context"
    )
    print(f"  attests      {observed.label or 'no readable weight version'}")
    print(f"  paused       {'unknown' if observed.paused is None else 'yes' if observed.paused else 'no'}")
    print(f"  process      started at {observed.boot or 'unknown'} (Unix seconds)")
    for problem in facts.missing:
        print(f"  MISSING      {problem}")
    for problem in facts.exposed:
        print(f"  UNSAFE       {problem}")
    print(
        "rc can drive this engine."
        if not facts.missing
        else "rc cannot drive this engine until what is MISSING is there."
    )
