"""The policy that the demo trains: a small Qwen3 with random weights, or any causal language model on disk.

A directory in Hugging Face's layout is what both sides start from: vLLM serves it in bfloat16, and the trainer loads
the same bytes here.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rc.errors import CallerError, PromptTooLong

__all__ = ("InvalidModel", "Policy", "build_small_policy", "load_policy")

_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
_SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]

# vLLM's CPU kernels want a vocabulary that is a multiple of 64.
_VOCABULARY_MULTIPLE = 64


class InvalidModel(CallerError):
    """A directory that the demo cannot train from. Nothing in it was changed."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"{directory}: {problem}")
        self.directory = directory
        self.problem = problem


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A causal language model in float32, its tokenizer, and the directory that both came from."""

    directory: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def max_model_len(self) -> int:
        """The longest prompt plus completion, in tokens, that the model has positions for."""
        return int(getattr(self.model.config, "max_position_embeddings", 2048))

    def encode(self, prompt: str, *, max_tokens: int, max_model_len: int | None = None) -> list[int]:
        """Give a prompt's token ids; raise `PromptTooLong` where ``max_tokens`` more would not fit.

        ``max_model_len`` is the engine's limit where that is lower than the model's own.
        """
        token_ids: list[int] = self.tokenizer(prompt)["input_ids"]
        limit = min(self.max_model_len, max_model_len or self.max_model_len)
        if not token_ids:
            raise InvalidModel(self.directory, f"its tokenizer gives no token for the prompt {prompt!r}")
        if len(token_ids) + max_tokens > limit:
            raise PromptTooLong(len(token_ids), max_tokens, limit)
        return token_ids

    def decode(self, token_ids: list[int]) -> str:
        """Give a completion's text, special tokens left out."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def build_small_policy(directory: Path, seed: int) -> None:
    """Write a 2.4 M-parameter Qwen3 with random weights and a character tokenizer, in bfloat16.

    The same seed gives the same bytes. The directory appears whole or not at all; one that already holds something is
    left alone and raises `InvalidModel`.
    """
    if directory.exists() and any(directory.iterdir()):
        raise InvalidModel(directory, "already holds something; name another directory, or remove this one")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = _character_tokenizer()
    tokenizer.save_pretrained(partial)
    _random_qwen3(len(tokenizer), seed).save_pretrained(partial)
    partial.replace(directory)


def _character_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(_SPECIAL_TOKENS + _CHARACTERS)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=1024,
    )


def _random_qwen3(vocabulary: int, seed: int) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=vocabulary + -vocabulary % _VOCABULARY_MULTIPLE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).to(torch.bfloat16)


def load_policy(directory: Path) -> Policy:
    """Load a model and its tokenizer from disk, never from a network and never running code that lies beside them.

    Raises `InvalidModel` saying what is missing, which includes parameters that the checkpoint does not hold.
    """
    if not (directory / "config.json").is_file():
        raise InvalidModel(directory, "holds no config.json; name a directory in Hugging Face's layout")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model, loading = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InvalidModel(directory, f"is not a causal language model that transformers loads: {error}") from error
    _check_complete(directory, loading)
    return Policy(directory=directory, model=model, tokenizer=tokenizer)


def _check_complete(directory: Path, loading: dict[str, Any]) -> None:
    absent = sorted(str(name) for key in ("missing_keys", "mismatched_keys") for name in loading.get(key, ()))
    if absent:
        named = ", ".join(absent[:3])
        raise InvalidModel(
            directory,
            f"{len(absent)} parameters are missing or of another shape ({named}, …); "
            f"they would be random here and refused by vLLM, so restore the checkpoint",
        )
