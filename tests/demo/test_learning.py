"""The policy learns its task without an engine, from nothing but rewards of what it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rc.demo.grpo import Completion, Group, GrpoTrainer, StepReport
from rc.demo.policy import Policy, build_small_policy, load_policy
from rc.demo.task import Prompt, built_in_prompts, prompt_batch, reward


def sample(policy: Policy, prompts: Sequence[Prompt], *, completions: int, max_tokens: int, seed: int) -> list[Group]:
    """Sample without an engine: transformers' own loop, prompts padded on the left."""
    encoded = [policy.encode(prompt.text, max_tokens=max_tokens) for prompt in prompts for _ in range(completions)]
    width = max(map(len, encoded))
    input_ids = torch.tensor([[0] * (width - len(row)) + row for row in encoded])
    attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
    torch.manual_seed(seed)
    output = policy.model.generate(
        input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max_tokens,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        eos_token_id=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = output.sequences[:, width:]
    logprobs = torch.stack(output.logits, dim=1).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    samples = [
        _scored(policy, prompts[row // completions], tokens[row].tolist(), logprobs[row].tolist(), max_tokens)
        for row in range(len(encoded))
    ]
    return [
        Group(prompt_ids=encoded[start], completions=samples[start : start + completions])
        for start in range(0, len(encoded), completions)
    ]


def _scored(policy: Policy, prompt: Prompt, tokens: list[int], logprobs: list[float], max_tokens: int) -> Completion:
    length = tokens.index(2) + 1 if 2 in tokens else len(tokens)
    text = policy.decode(tokens[:length])
    score = reward(prompt.rule, text, max_tokens)
    return Completion(token_ids=tokens[:length], logprobs=logprobs[:length], reward=score)


def train(directory: Path, seed: int, *, steps: int, max_tokens: int) -> list[StepReport]:
    policy = load_policy(directory)
    trainer = GrpoTrainer(policy.model, learning_rate=1.5e-3, threads=1)
    reports = []
    for step in range(steps):
        batch = prompt_batch(built_in_prompts(), seed=seed, cursor=8 * step, count=8)
        groups = sample(policy, batch, completions=8, max_tokens=max_tokens, seed=1000 * seed + step)
        reports.append(trainer.step(groups))
    return reports


@pytest.mark.timeout(300)  # about 15 s where the machine is idle
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises(tmp_path: Path, seed: int) -> None:
    build_small_policy(tmp_path / "policy", seed)
    reports = train(tmp_path / "policy", seed, steps=12, max_tokens=12)
    rewards = [report.reward_mean for report in reports]
    assert sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3 > 0.15, rewards
    assert max(report.logprob_gap_max for report in reports) < 1e-3


def _llama_with_byte_tokenizer(directory: Path) -> None:
    """Write a model of another family: tied head, byte-level tokenizer with merges, float32 on disk."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet, "AB"])}
    raw = Tokenizer(models.BPE(vocabulary, [("A", "B")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        attention_dropout=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def test_another_model_with_another_tokenizer_learns_too(tmp_path: Path) -> None:
    _llama_with_byte_tokenizer(tmp_path)
    policy = load_policy(tmp_path)
    prompt = policy.encode("Écris en majuscules : ", max_tokens=8)
    good, bad = policy.encode("ABAB", max_tokens=8), policy.encode("abab", max_tokens=8)
    assert (len(good), policy.decode(good)) == (2, "ABAB")
    trainer = GrpoTrainer(policy.model, learning_rate=1e-3)
    before = sum(trainer.logprobs(prompt, good)), sum(trainer.logprobs(prompt, bad))
    samples = [
        Completion(token_ids=t, logprobs=trainer.logprobs(prompt, t), reward=reward("UPPERCASE", policy.decode(t), 4))
        for t in (good, bad)
    ]
    report = trainer.step([Group(prompt_ids=prompt, completions=samples)])
    assert report.logprob_gap_max == 0.0  # dropout is off on this side as it is in the engine
    assert report.reward_mean == 0.5
    after = sum(trainer.logprobs(prompt, good)), sum(trainer.logprobs(prompt, bad))
    assert after[0] > before[0]
    assert after[1] < before[1]
    published = trainer.published
    assert published.get_parameter("model.embed_tokens.weight") is published.lm_head.weight
