"""Small random-weight checkpoints that vLLM 0.32 loads on a CPU in half a minute.

python -m harness.tiny_models qwen3 DIRECTORY SEED        2.4 M parameters, a head of its own
python -m harness.tiny_models opt125m DIRECTORY SEED      125 M parameters, OPT-125M's shape, tied head
python -m harness.tiny_models qwen2audio DIRECTORY SEED   0.5 M parameters, with an audio encoder and its cache
"""

from __future__ import annotations

import sys
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioEncoderConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2Config,
    WhisperFeatureExtractor,
)

from rc.demo.policy import build_small_policy

__all__ = ("RECIPES", "build_opt125m", "build_qwen2audio")

_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]

# vLLM's CPU kernels want a vocabulary that is a multiple of this.
_VOCABULARY_MULTIPLE = 64

_CHAT_TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}{% if c['type']=='text' %}{{ c['text'] }}"
    "{% else %}<|audio_bos|><|AUDIO|><|audio_eos|>{% endif %}{% endfor %}{% endfor %}"
)


def build_opt125m(directory: Path, seed: int) -> None:
    """Write a model of OPT-125M's shape. Its head is tied to the embedding, so no file lists it."""
    _character_tokenizer([]).save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        OPTForCausalLM(OPTConfig()).to(torch.bfloat16).save_pretrained(directory)


def build_qwen2audio(directory: Path, seed: int) -> None:
    """Write a Qwen2-Audio in miniature. Audio, because vision models need torchvision."""
    tokenizer = _character_tokenizer(["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    # vLLM expects Whisper's 3000 mel frames, which are 30 s and 1500 positions of the encoder.
    extractor = WhisperFeatureExtractor(feature_size=80, sampling_rate=16000)
    processor = Qwen2AudioProcessor(feature_extractor=extractor, tokenizer=tokenizer, chat_template=_CHAT_TEMPLATE)
    processor.save_pretrained(directory)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2AudioForConditionalGeneration(_qwen2audio_config(tokenizer))
    model.to(torch.bfloat16).save_pretrained(directory)
    _rename_for_vllm(directory / "model.safetensors")


def _qwen2audio_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2AudioConfig:
    encoder = Qwen2AudioEncoderConfig(
        num_mel_bins=80,
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=128,
        max_source_positions=1500,
    )
    text = Qwen2Config(
        vocab_size=len(tokenizer) + -len(tokenizer) % _VOCABULARY_MULTIPLE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Qwen2AudioConfig(
        audio_config=encoder.to_dict(),
        text_config=text.to_dict(),
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
    )


def _rename_for_vllm(file: Path) -> None:
    """Undo the names that transformers 5 saves and vLLM's loader does not map."""
    tensors = load_file(file)
    renamed = {
        name.replace("language_model.model.model.", "language_model.model."): tensor.clone()
        for name, tensor in tensors.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})


def _character_tokenizer(special_tokens: list[str]) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *_CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=special_tokens,
        model_max_length=1024,
    )


RECIPES = {"qwen3": build_small_policy, "opt125m": build_opt125m, "qwen2audio": build_qwen2audio}
"""Each recipe by name; all take a directory and a seed."""


if __name__ == "__main__":
    recipe, directory, seed = sys.argv[1:]
    RECIPES[recipe](Path(directory), int(seed))
