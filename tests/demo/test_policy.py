"""The policy on disk: built from a seed, or loaded whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rc.demo.policy import InvalidModel, build_small_policy, load_policy
from rc.errors import PromptTooLong


def test_a_seed_gives_the_same_bytes_and_leaves_torchs_random_state_alone(small_policy: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    (tmp_path / ".again.partial").mkdir()  # what a killed run leaves
    build_small_policy(tmp_path / "again", seed=0)
    build_small_policy(tmp_path / "other", seed=1)
    weights = [(d / "model.safetensors").read_bytes() for d in (small_policy, tmp_path / "again", tmp_path / "other")]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(torch.get_rng_state(), before)
    assert not (tmp_path / ".again.partial").exists()


def test_a_directory_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(InvalidModel, match="already holds something"):
        build_small_policy(tmp_path, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_text_survives_the_small_policys_tokenizer_one_character_a_token(small_policy: Path) -> None:
    policy = load_policy(small_policy)
    text = "a. UPPERCASE: ~!\n"
    token_ids = policy.encode(text, max_tokens=8)
    assert len(token_ids) == len(text)
    assert policy.decode(token_ids) == text
    assert policy.decode([2, 0, *token_ids[:2], 120]) == "a."  # special tokens, and ids that name nothing, have no text


def test_a_prompt_that_leaves_no_room_is_refused(small_policy: Path) -> None:
    policy = load_policy(small_policy)
    with pytest.raises(PromptTooLong, match="2048"):
        policy.encode("x" * 2040, max_tokens=9)
    with pytest.raises(PromptTooLong, match="64"):
        policy.encode("x" * 60, max_tokens=5, max_model_len=64)
    with pytest.raises(InvalidModel, match="no token"):
        policy.encode("", max_tokens=1)


def _without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def _without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _with_bad_config(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "toaster"}')


def _with_torn_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _without_one_parameter(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_without_config, "config.json"),
        (_without_weights, "not a causal language model"),
        (_with_bad_config, "not a causal language model"),
        (_with_torn_weights, "not a causal language model"),
        (_without_one_parameter, "1 parameters are missing"),
    ],
)
def test_a_model_directory_that_is_not_whole_is_refused(
    small_policy: Path, tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for path in small_policy.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    damage(directory)
    with pytest.raises(InvalidModel, match=problem) as caught:
        load_policy(directory)
    assert str(directory) in str(caught.value)
