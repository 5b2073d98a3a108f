"""The trainer's state on disk, so that a demo killed at any moment goes on after the last step that was saved.

A checkpoint is one safetensors file. It is written beside its place, synced and renamed over the one before, so the
name always holds a whole checkpoint: the old one or the new one. A digest over tensors and counters is kept in its
header and checked on loading, because a disk can damage a file that a program wrote well.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rc.demo.grpo import MASTER, GrpoTrainer
from rc.errors import RolloutCoreError

__all__ = (
    "CheckpointError",
    "CheckpointNotWritten",
    "ForeignCheckpoint",
    "Resumed",
    "TornCheckpoint",
    "load_checkpoint",
    "save_checkpoint",
)

_FORMAT = "rc-demo-trainer"
_FORMAT_VERSION = 1
_RANDOM_STATE = "random/torch"


class CheckpointError(RolloutCoreError):
    """A checkpoint that cannot be read or written, or is not fit for this trainer. The trainer was not changed."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class CheckpointNotWritten(CheckpointError):
    """The file system refused; the checkpoint before, if there was one, is still in place."""


class TornCheckpoint(CheckpointError):
    """The file is cut short, altered, or no safetensors file at all."""


class ForeignCheckpoint(CheckpointError):
    """A safetensors file, but not this trainer's: another program's, another model's, or of a newer format."""


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """Where a loaded checkpoint left off: steps taken, and prompts of the endless sequence already used."""

    steps_done: int
    prompts_cursor: int


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    """The file's metadata; safetensors keeps text alone."""

    format: str
    version: str
    steps_done: str
    prompts_cursor: str
    sha256: str


def save_checkpoint(path: Path, trainer: GrpoTrainer, *, prompts_cursor: int = 0) -> None:
    """Replace the checkpoint at ``path`` by the trainer's present state; once this returns, it is on disk.

    Raises `CheckpointNotWritten`.
    """
    tensors = {**trainer.state(), _RANDOM_STATE: torch.get_rng_state()}
    counters = (str(trainer.steps_done), str(prompts_cursor))
    header = _Header(
        format=_FORMAT,
        version=str(_FORMAT_VERSION),
        steps_done=counters[0],
        prompts_cursor=counters[1],
        sha256=_digest(tensors, counters),
    )
    partial = path.with_name(f"{path.name}.partial")
    try:
        save_file(tensors, partial, metadata=msgspec.to_builtins(header))
        _sync(partial)
        partial.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise CheckpointNotWritten(path, f"cannot be written ({error}); free space or choose another place") from error


def load_checkpoint(path: Path, trainer: GrpoTrainer) -> Resumed:
    """Put the trainer, and torch's random state, where they were when the checkpoint was saved.

    Raises `TornCheckpoint`, `ForeignCheckpoint`, and `CheckpointError` where there is nothing to read.
    """
    metadata, tensors = _read(path)
    header = _header(path, metadata)
    counters = (header.steps_done, header.prompts_cursor)
    if _digest(tensors, counters) != header.sha256:
        raise TornCheckpoint(path, "its content does not match its digest; restore a copy, or remove it to begin anew")
    _check_same_model(path, tensors, trainer)
    torch.set_rng_state(tensors.pop(_RANDOM_STATE))
    trainer.load_state(tensors, steps_done=int(header.steps_done))
    return Resumed(steps_done=int(header.steps_done), prompts_cursor=int(header.prompts_cursor))


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except OSError as error:
        raise CheckpointError(path, f"cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        problem = f"is cut short or no checkpoint ({error}); restore a copy, or remove it to begin anew"
        raise TornCheckpoint(path, problem) from error


def _header(path: Path, metadata: Mapping[str, str]) -> _Header:
    if metadata.get("format") != _FORMAT:
        raise ForeignCheckpoint(path, "is a safetensors file of another program; name the demo's own checkpoint")
    if metadata.get("version") != str(_FORMAT_VERSION):
        found = metadata.get("version")
        raise ForeignCheckpoint(path, f"has format version {found}, and this rc reads {_FORMAT_VERSION}; upgrade rc")
    try:
        return msgspec.convert(metadata, _Header)
    except msgspec.ValidationError as error:
        raise TornCheckpoint(path, f"has a damaged header ({error}); remove it to begin anew") from error


def _check_same_model(path: Path, tensors: Mapping[str, Tensor], trainer: GrpoTrainer) -> None:
    saved, present = _masters(tensors), _masters(trainer.state())
    if saved != present:
        differing = sorted(name for name, _ in saved ^ present)
        raise ForeignCheckpoint(
            path, f"belongs to another model ({differing[0]} differs); load it with the model it was saved with"
        )


def _masters(tensors: Mapping[str, Tensor]) -> set[tuple[str, torch.Size]]:
    return {(name, value.shape) for name, value in tensors.items() if name.startswith(f"{MASTER}/")}


def _digest(tensors: Mapping[str, Tensor], counters: tuple[str, str]) -> str:
    digest = hashlib.sha256("/".join(counters).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"\n{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Force a file's content, or a directory's entries, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
