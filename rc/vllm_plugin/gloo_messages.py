"""What the two ends of the ``rc_gloo`` backend tell each other, through vLLM's weight routes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from rc.versions import Manifest, ParameterSpec

__all__ = ("GlooInitInfo", "GlooUpdateInfo")


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):
    """Where the trainer waits, and which ranks this engine's workers have: ``rank_offset`` + their index."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass(kw_only=True)
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of a payload, in the order in which they are sent."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise ValueError(
                f"names, dtypes and shapes differ in length: {len(self.names)}, {len(self.dtypes)}, {len(self.shapes)}"
            )
        if len(set(self.names)) != len(self.names):
            raise ValueError("a parameter is announced twice")

    def manifest(self) -> Manifest:
        """Give what is announced as a manifest."""
        return Manifest.of(
            ParameterSpec(name=name, dtype=dtype, shape=tuple(shape))
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        )

    def buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Allocate a CPU tensor for each parameter."""
        return [
            (name, torch.empty(shape, dtype=_dtype(dtype)))
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        ]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype
