"""A rollout of 256 tokens finishes under its own version before an update that was requested meanwhile begins.

The proof is the journal's order on a real engine: ``finish_rollout`` has a lower sequence number than ``begin_update``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median

import anyio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import rc
from harness.artifact import Experiment
from harness.engines import running_engine
from rc.demo.policy import build_small_policy
from rc.events.sqlite_reader import SqliteReader
from rc.events.types import BeginUpdate, FinishRollout, RequestUpdate
from rc.versions import version_label

__all__ = ("drain_order",)

TOKENS = 256
STEPS = range(2, 5)
"""Versions whose update is requested in the middle of a rollout."""


async def drain_order(experiment: Experiment, journal: Path, url: str, model: PreTrainedModel) -> None:
    """Request an update in the middle of a long rollout, several times over, and check the order in the journal."""
    async with rc.Controller.open(journal, engine=url) as control:
        # The first update imports vLLM on the trainer's side and forms the transfer group: seconds, without a rollout.
        await control.update(rc.WeightIdentity(run="drain-order", step=1), rc.ModuleWeights(model))
        drains_s = [await _update_in_mid_rollout(control, model, step) for step in STEPS]
    requested, finished, begun = await _order(experiment, journal)
    for step in STEPS:
        order = [requested[step], finished[step - 1], begun[step]]
        experiment.check(f"request, finish at rc-{step - 1}, begin towards rc-{step}, by seq", sorted(order), order)
    experiment.figures["drain_s"] = round(median(drains_s), 3)
    experiment.figures["drain_s_max"] = round(max(drains_s), 3)


async def _update_in_mid_rollout(control: rc.Controller, model: PreTrainedModel, step: int) -> float:
    admitted = anyio.Event()

    async def long_rollout() -> None:
        async with control.rollout() as rollout:
            admitted.set()
            await rollout.generate([1, *range(5, 40)], max_tokens=TOKENS, temperature=1.0, seed=step, ignore_eos=True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(long_rollout)
        await admitted.wait()
        await anyio.sleep(0.2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        commit = await control.update(rc.WeightIdentity(run="drain-order", step=step), rc.ModuleWeights(model))
    print(f"  update to {commit.label} waited {commit.drain_s:.3f} s for a rollout of {TOKENS} tokens", flush=True)
    return commit.drain_s


async def _order(experiment: Experiment, journal: Path) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """Sequence numbers of request, finish and begin, by version; each rollout's attestation is checked on the way."""
    requested: dict[int, int] = {}
    finished: dict[int, int] = {}
    begun: dict[int, int] = {}
    async with SqliteReader.open(journal) as reader:
        async for record in reader.records():
            match record.event:
                case RequestUpdate(target=target):
                    requested[target] = record.seq
                case BeginUpdate(target=target):
                    begun[target] = record.seq
                case FinishRollout() as event:
                    finished[event.version] = record.seq
                    label = version_label(event.version)
                    spans = [[span.label, span.start, span.end] for span in event.turns[0].spans]
                    experiment.check(f"spans that the engine attests at {label}", [[label, 0, TOKENS]], spans)
    return requested, finished, begun


async def main() -> Experiment:
    """Run it on an engine of its own."""
    experiment = Experiment("drain_order", profile="stock")
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        build_small_policy(directory / "policy", seed=0)
        model = AutoModelForCausalLM.from_pretrained(directory / "policy", dtype=torch.bfloat16)
        async with running_engine(directory / "policy", directory / "engine.log") as engine:
            await drain_order(experiment, directory / "run.db", engine.url, model)
    return experiment


if __name__ == "__main__":
    result = anyio.run(main)
    print(f"{result.write()}: {'passed' if result.passed else 'FAILED'}")
    sys.exit(0 if result.passed else 1)
