"""A head that is tied to the embedding: vLLM on CPU packs it separately, and keeps the old one unless it is sent."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import rc
from harness.engines import running_engine

PROMPT = [1, *range(5, 40)]


def tied_policy(policy_directory: Path, directory: Path) -> PreTrainedModel:
    """Write the small policy's shape with a tied head, and give the trainer's side of it."""
    shutil.copytree(policy_directory, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(directory)
    config.tie_word_embeddings = True
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    assert isinstance(model, PreTrainedModel)
    return model


async def test_the_engine_samples_with_the_head_that_was_sent(policy_directory: Path, tmp_path: Path) -> None:
    model = tied_policy(policy_directory, tmp_path / "tied")
    assert "lm_head.weight" not in dict(model.named_parameters())
    async with (
        running_engine(tmp_path / "tied", tmp_path / "engine.log") as engine,
        rc.Controller.open(tmp_path / "run.db", engine=engine.url) as control,
    ):
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        await control.update(rc.WeightIdentity(run="r", step=1), rc.ModuleWeights(model))
        async with control.rollout() as rollout:
            turn = await rollout.generate(PROMPT, max_tokens=12, temperature=0.0, ignore_eos=True)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + list(turn.token_ids)])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.float().log_softmax(-1).gather(1, torch.tensor(turn.token_ids)[:, None])[:, 0]
    # bfloat16 keeps 8 bits of mantissa; both sides round activations in different orders.
    torch.testing.assert_close(torch.tensor(turn.logprobs), expected, atol=0.1, rtol=0.0)
