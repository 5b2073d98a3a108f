"""A model of a few hundred parameters, and groups for it to learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rc.demo.grpo import Completion, Group, GrpoTrainer

ADAM_FIRST_MOMENT = 0.1
"""Share of the first gradient that AdamW's first moment holds after one update: 1 - beta1."""


def micro_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    return Qwen3ForCausalLM(config)


def micro_trainer(
    *,
    serve_dtype: torch.dtype = torch.float32,
    learning_rate: float = 1e-2,
    max_grad_norm: float = math.inf,
    tokens_per_pass: int = 4096,
    temperature: float = 1.0,
) -> GrpoTrainer:
    return GrpoTrainer(
        micro_model(),
        learning_rate=learning_rate,
        serve_dtype=serve_dtype,
        max_grad_norm=max_grad_norm,
        tokens_per_pass=tokens_per_pass,
        temperature=temperature,
    )


def completion(
    trainer: GrpoTrainer, prompt: Sequence[int], tokens: Sequence[int], reward: float, off: float = 0.0
) -> Completion:
    """Make a completion whose behaviour logprobs lie ``off`` below the trainer's own."""
    logprobs = [min(0.0, value - off) for value in trainer.logprobs(prompt, tokens)]
    return Completion(token_ids=tokens, logprobs=logprobs, reward=reward)


def groups_of(trainer: GrpoTrainer, off: float = 0.0) -> list[Group]:
    """Make two groups of unlike lengths, prompts too."""
    shapes: list[tuple[list[int], list[tuple[list[int], float]]]] = [
        ([1, 2, 3], [([4, 5, 6, 7, 8], 1.0), ([9], 0.0), ([10, 11], 0.25)]),
        ([12, 13, 14, 15, 1, 2], [([3, 3, 3], 0.5), ([4, 8, 2, 6], 1.5), ([7, 7], 0.5)]),
    ]
    return [
        Group(
            prompt_ids=prompt,
            completions=[completion(trainer, prompt, tokens, reward, off) for tokens, reward in samples],
        )
        for prompt, samples in shapes
    ]


def gradient(trainer: GrpoTrainer) -> dict[str, Tensor]:
    """Give the gradient of a trainer's first update, read from the optimizer's first moment."""
    slots = trainer.state().items()
    return {key.partition("/")[2]: slot / ADAM_FIRST_MOMENT for key, slot in slots if key.startswith("exp_avg/")}


def weights(trainer: GrpoTrainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.published.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
