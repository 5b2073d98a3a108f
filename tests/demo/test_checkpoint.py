"""The trainer's state on disk: exact, atomic, and refused where it is damaged or foreign."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rc.demo import checkpoint
from rc.demo.checkpoint import (
    CheckpointError,
    CheckpointNotWritten,
    ForeignCheckpoint,
    TornCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from rc.demo.grpo import GrpoTrainer
from rc.demo.policy import load_policy
from tests.demo.micro import groups_of, micro_trainer, same, weights


def test_a_trainer_that_goes_on_from_a_checkpoint_takes_the_same_step(tmp_path: Path) -> None:
    path = tmp_path / "trainer.safetensors"
    first, second = micro_trainer(serve_dtype=torch.bfloat16), micro_trainer(serve_dtype=torch.bfloat16)
    for _ in range(2):
        first.step(groups_of(first))
    save_checkpoint(path, first, prompts_cursor=16)
    drawn = torch.rand(3)
    resumed = load_checkpoint(path, second)
    assert (resumed.steps_done, resumed.prompts_cursor, second.steps_done) == (2, 16, 2)
    assert torch.equal(torch.rand(3), drawn)
    assert same(weights(first), weights(second))
    for trainer in (first, second):
        assert trainer.step(groups_of(trainer)).step == 3
    assert same(first.state(), second.state())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_checkpoint_of_a_trainer_that_took_no_step_loads(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", micro_trainer())
    trainer = micro_trainer()
    trainer.step(groups_of(trainer))
    load_checkpoint(tmp_path / "c", trainer)
    assert same(trainer.state(), micro_trainer().state())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = micro_trainer()
    trainer.step(groups_of(trainer))
    save_checkpoint(tmp_path / "trainer.safetensors", trainer)
    return tmp_path / "trainer.safetensors"


def _assert_refused(path: Path, error: type[CheckpointError], problem: str, trainer: GrpoTrainer | None = None) -> None:
    trainer = trainer or micro_trainer()
    before = {name: value.clone() for name, value in trainer.state().items()}
    with pytest.raises(error, match=problem) as caught:
        load_checkpoint(path, trainer)
    assert type(caught.value) is error
    assert str(path) in str(caught.value)
    assert same(trainer.state(), before)
    assert trainer.steps_done == 0


@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 0.5, 0.999])
def test_a_checkpoint_that_is_cut_short_is_refused(saved: Path, share: float) -> None:
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * share)])
    _assert_refused(saved, TornCheckpoint, "cut short or no checkpoint")


def test_a_checkpoint_with_a_flipped_bit_anywhere_is_refused(saved: Path) -> None:
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for position in range(header, len(content), len(content) // 40):
        saved.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        _assert_refused(saved, TornCheckpoint, "does not match its digest")


def test_a_checkpoint_whose_step_was_edited_is_refused(saved: Path) -> None:
    content = saved.read_bytes()
    assert content.count(b'"steps_done":"1"') == 1
    saved.write_bytes(content.replace(b'"steps_done":"1"', b'"steps_done":"7"'))
    _assert_refused(saved, TornCheckpoint, "does not match its digest")


def test_a_file_that_is_no_checkpoint_of_ours_is_refused(saved: Path, small_policy: Path, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a checkpoint, but long enough to have a header's length")
    _assert_refused(text, TornCheckpoint, "no checkpoint")
    _assert_refused(tmp_path / "absent", CheckpointError, "cannot be read")
    _assert_refused(small_policy / "model.safetensors", ForeignCheckpoint, "another program")
    other = GrpoTrainer(load_policy(small_policy).model, learning_rate=1e-3)
    _assert_refused(saved, ForeignCheckpoint, "belongs to another model", other)
    newer = saved.read_bytes().replace(b'"version":"1"', b'"version":"2"')
    saved.write_bytes(newer)
    _assert_refused(saved, ForeignCheckpoint, "format version 2, and this rc reads 1")


def test_a_full_disk_leaves_the_checkpoint_before_in_place(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer = micro_trainer()
    content = saved.read_bytes()
    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(CheckpointNotWritten, match="No space left on device"):
        save_checkpoint(saved, trainer)
    assert saved.read_bytes() == content
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]
    with pytest.raises(CheckpointNotWritten):
        save_checkpoint(saved.parent / "absent" / "c", trainer)


_KILLED_WHILE_SAVING = """
import os, signal, sys, time
from pathlib import Path
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from rc.demo.checkpoint import load_checkpoint, save_checkpoint
from rc.demo.grpo import GrpoTrainer

torch.set_num_threads(1)
path = Path(sys.argv[1])
config = Qwen3Config(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1, head_dim=64, tie_word_embeddings=False)
trainer = GrpoTrainer(Qwen3ForCausalLM(config), learning_rate=1e-3)
save_checkpoint(path, trainer)
for kill in range(20):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            trainer.steps_done += 1
            save_checkpoint(path, trainer)
            os.write(writer, bytes([1]))
    os.close(writer)
    first = os.read(reader, 1)  # a save has returned: the next one is under way
    assert first, "the child ended by itself"
    time.sleep(0.0013 * kill)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    acknowledged = trainer.steps_done + len(first) + len(os.read(reader, 1 << 16))
    os.close(reader)
    resumed = load_checkpoint(path, trainer)
    assert acknowledged <= resumed.steps_done <= acknowledged + 1, (kill, acknowledged, resumed)
print(trainer.steps_done)
"""


@pytest.mark.timeout(300)  # about 10 s where the machine is idle
def test_a_kill_at_any_moment_leaves_the_last_saved_checkpoint_or_the_one_being_saved(tmp_path: Path) -> None:
    path = tmp_path / "trainer.safetensors"
    command = [sys.executable, "-c", _KILLED_WHILE_SAVING, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20
