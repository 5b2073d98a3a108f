"""Updates of a real vLLM server while rollouts run on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import rc
from harness.artifact import Experiment
from harness.drain_order import drain_order
from rc.effects.process import EngineProcess
from rc.effects.protocol import GenerateRequest, Generation, Ok, Outcome
from rc.effects.vllm_http import VllmHttpEngine
from rc.errors import EngineUnsuitable, InvalidIdentity, InvalidWeights, PromptTooLong
from rc.lifecycle import Phase

# vLLM on CPU caches prefixes in blocks of 128 tokens: two blocks, and some.
PROMPT = [1, *(5 + position * 7 % 90 for position in range(280))]


def perturb(model: PreTrainedModel, seed: int) -> None:
    """Move every weight a little, as a training step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)


async def greedy(control: rc.Controller, tokens: int = 16) -> rc.Turn:
    async with control.rollout() as rollout:
        return await rollout.generate(PROMPT, max_tokens=tokens, temperature=0.0, ignore_eos=True)


async def test_a_long_rollout_finishes_at_its_version_before_the_update_begins(
    engine_url: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    experiment = Experiment("drain_order", profile="stock")
    await drain_order(experiment, tmp_path / "run.db", engine_url, model)
    assert experiment.passed


async def test_the_engine_samples_from_the_weights_that_were_sent(
    engine_url: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    async with rc.Controller.open(tmp_path / "run.db", engine=engine_url) as control:
        for step in (1, 2):
            perturb(model, step)
            await control.update(rc.WeightIdentity(run="r", step=step), rc.ModuleWeights(model))
            turn = await greedy(control)
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + list(turn.token_ids)])).logits[0, len(PROMPT) - 1 : -1]
            expected = logits.float().log_softmax(-1).gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
            # bfloat16 keeps 8 bits of mantissa; both sides round activations in different orders.
            torch.testing.assert_close(torch.tensor(turn.logprobs), expected, atol=0.08, rtol=0.0)


async def test_the_server_process_stays_the_same_through_updates(
    engine_url: str, server: EngineProcess, model: PreTrainedModel, tmp_path: Path
) -> None:
    before = server.identity
    async with rc.Controller.open(tmp_path / "run.db", engine=engine_url) as control:
        boot = control.state.engine(engine_url).boot
        await control.update(rc.WeightIdentity(run="r", step=1), rc.ModuleWeights(model))
        assert control.state.engine(engine_url).boot == boot
    assert before.alive


class StaleEngine(VllmHttpEngine):
    """What rc must prevent: no cache is reset, and prefixes are not salted by version."""

    async def reset_prefix_cache(self) -> Outcome[bool]:
        return Ok(True)

    async def generate(self, request: GenerateRequest) -> Outcome[Generation]:
        unsalted = GenerateRequest(
            request=request.request,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            cache_salt="always the same",
        )
        return await super().generate(unsalted)


async def test_no_prefix_of_an_old_version_is_served_after_an_update(
    engine_url: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    """The control, with invalidation switched off, has stale hits and samples other tokens; rc has none."""
    async with rc.Controller.open(tmp_path / "stale.db", engine=StaleEngine(engine_url)) as control:
        assert (await greedy(control)).cached_tokens == 0
        assert (await greedy(control)).cached_tokens, "the prompt is long enough to be cached"
        perturb(model, 1)
        await control.update(rc.WeightIdentity(run="r", step=1), rc.ModuleWeights(model))
        stale = await greedy(control)
    adapter = VllmHttpEngine(engine_url)
    assert isinstance(await adapter.set_label("default"), Ok)
    await adapter.aclose()
    async with rc.Controller.open(tmp_path / "run.db", engine=engine_url) as control:
        await greedy(control)
        assert (await greedy(control)).cached_tokens, "within one version the cache is used"
        await control.update(rc.WeightIdentity(run="r", step=1), rc.ModuleWeights(model))
        fresh = await greedy(control)
    assert stale.cached_tokens, "the control must hit the old version's cache, else this test shows nothing"
    assert stale.token_ids != fresh.token_ids
    assert fresh.cached_tokens == 0


def without_a_parameter(model: PreTrainedModel) -> rc.ModuleWeights:
    del model.model.norm.weight
    return rc.ModuleWeights(model)


def with_nan(model: PreTrainedModel) -> rc.ModuleWeights:
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    return rc.ModuleWeights(model)


@pytest.mark.parametrize(
    ("weights_of", "step", "complaint"),
    [
        pytest.param(lambda model: rc.ModuleWeights(model, dtype=torch.float32), 6, "float32", id="another dtype"),
        pytest.param(without_a_parameter, 6, "model.norm.weight is missing", id="a parameter missing"),
        pytest.param(with_nan, 6, "model.norm.weight holds NaN", id="NaN"),
        pytest.param(rc.ModuleWeights, 4, "step 4", id="a step that goes backwards"),
    ],
)
async def test_weights_that_do_not_fit_are_refused_and_the_engine_goes_on(
    engine_url: str,
    model: PreTrainedModel,
    tmp_path: Path,
    weights_of: Callable[[PreTrainedModel], rc.ModuleWeights],
    step: int,
    complaint: str,
) -> None:
    async with rc.Controller.open(tmp_path / "run.db", engine=engine_url) as control:
        await control.update(rc.WeightIdentity(run="r", step=5), rc.ModuleWeights(model))
        before = await greedy(control)
        with pytest.raises((InvalidWeights, InvalidIdentity), match=complaint):
            await control.update(rc.WeightIdentity(run="r", step=step), weights_of(model))
        published = control.published
        assert published is not None
        assert published.version == 1
        assert (await greedy(control)).token_ids == before.token_ids
        assert control.state.engine(engine_url).phase is Phase.READY


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_sent(engine_url: str, tmp_path: Path) -> None:
    async with rc.Controller.open(tmp_path / "run.db", engine=engine_url) as control:
        async with control.rollout() as rollout:
            with pytest.raises(PromptTooLong, match="context of 1024 tokens"):
                await rollout.generate([5] * 1020, max_tokens=5)
        assert control.state.rollouts.aborted == 1


async def test_an_engine_that_another_journal_labelled_is_refused(
    engine_url: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    async with rc.Controller.open(tmp_path / "one.db", engine=engine_url) as control:
        await control.update(rc.WeightIdentity(run="r", step=1), rc.ModuleWeights(model))
    with pytest.raises(EngineUnsuitable, match="never published"):
        async with rc.Controller.open(tmp_path / "two.db", engine=engine_url):
            pytest.fail("it was opened")
