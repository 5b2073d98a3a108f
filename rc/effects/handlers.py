"""Effect handlers: do what `rc.next_effects` calls for and report what the engine showed afterwards.

A handler takes no decision. Whatever an action's outcome, it looks at the engine again and reports both; the core
judges.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import anyio

from rc.effects.protocol import EngineAdapter, Failed, Ok, Outcome, Refused, Unknown, WeightSource, WeightTransfer
from rc.evidence import (
    CacheReport,
    Evidence,
    InstallReport,
    LookReport,
    PauseReport,
    PreflightReport,
    ResumeReport,
    ValidationReport,
)
from rc.next_effects import (
    Effect,
    InstallWeights,
    LookAtEngine,
    PauseEngine,
    ResetCaches,
    ResumeEngine,
    RunPreflight,
    ValidateEngine,
)

__all__ = ("EffectHandlers", "problem_of")


def problem_of(outcome: Outcome[Any]) -> str | None:
    """Put an outcome that is not ok into words; None if it is ok."""
    match outcome:
        case Ok():
            return None
        case Refused(message):
            return f"refused: {message}"
        case Failed(message):
            return f"failed: {message}"
        case Unknown(message):
            return f"outcome unknown: {message}"


class EffectHandlers:
    """Performs effects on the engines of one controller.

    ``weights`` holds the weights of updates in progress, by update id; the controller puts them there before it
    requests the update and removes them when it ends. An update of an earlier controller has none.
    """

    def __init__(self, engines: Mapping[str, EngineAdapter], transfer: WeightTransfer | None) -> None:
        self.weights: MutableMapping[str, WeightSource] = {}
        self._engines = engines
        self._transfer = transfer

    async def perform(self, effect: Effect) -> Evidence:
        """Act on the engine, look at it, report."""
        engine = self._engines[effect.engine]
        started = anyio.current_time()
        match effect:
            case LookAtEngine():
                return LookReport(observed=await engine.observe())
            case PauseEngine():
                problem = problem_of(await engine.pause())
                took_s = anyio.current_time() - started
                return PauseReport(observed=await engine.observe(), took_s=took_s, problem=problem)
            case RunPreflight():
                problem = await self._preflight(engine, effect)
                took_s = anyio.current_time() - started
                return PreflightReport(observed=await engine.observe(), took_s=took_s, problem=problem)
            case InstallWeights():
                return await self._install(engine, effect, started)
            case ResetCaches():
                return await _reset_caches(engine, started)
            case ValidateEngine():
                return ValidationReport(observed=await engine.observe(), checks=("boot", "label", "paused"))
            case ResumeEngine():
                problem = problem_of(await engine.resume())
                took_s = anyio.current_time() - started
                return ResumeReport(observed=await engine.observe(), took_s=took_s, problem=problem)

    async def _preflight(self, engine: EngineAdapter, effect: RunPreflight) -> str | None:
        if effect.path == "adopt":
            return None
        if self._transfer is None:
            return "this controller was opened without a weight transfer"
        if effect.update not in self.weights:
            return "the weights of this update ended with the controller that requested it"
        return await self._transfer.ready(engine)

    async def _install(self, engine: EngineAdapter, effect: InstallWeights, started: float) -> InstallReport:
        if effect.path == "adopt":
            outcome = await engine.set_label(effect.label)
            mutation: Literal["none", "possible", "complete"] = "none" if isinstance(outcome, Refused) else "possible"
            return InstallReport(
                observed=await engine.observe(),
                took_s=anyio.current_time() - started,
                problem=problem_of(outcome),
                mutation="complete" if isinstance(outcome, Ok) else mutation,
            )
        if self._transfer is None or effect.update is None:
            raise RuntimeError(f"{effect} was called for although preflight cannot have passed")
        return await self._transfer.install(engine, self.weights[effect.update], effect.label)


async def _reset_caches(engine: EngineAdapter, started: float) -> CacheReport:
    prefix = await engine.reset_prefix_cache()
    multimodal = await engine.reset_multimodal_cache()
    encoder = await engine.reset_encoder_cache()
    problems = [problem for problem in map(problem_of, (prefix, multimodal, encoder)) if problem is not None]
    if isinstance(prefix, Ok) and not prefix.value:
        problems.append("the engine answered success=false to the prefix cache reset: blocks are still in use")
    return CacheReport(
        observed=await engine.observe(),
        took_s=anyio.current_time() - started,
        problem="; ".join(problems) or None,
        prefix=isinstance(prefix, Ok) and prefix.value,
        multimodal=isinstance(multimodal, Ok),
        encoder=isinstance(encoder, Ok),
    )
