"""The worker's side of the ``rc_gloo`` backend: receive everything, check it, and only then touch the model.

The session is vLLM's own (start, update, finish, with its layerwise reload), but the reload begins when the whole payload is
there: a sender that dies in the middle leaves the worker with an error and the model as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rc.vllm_plugin.gloo_group import GlooGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

__all__ = ("GlooInitInfo", "GlooUpdateInfo", "GlooWeightTransferEngine")

logger = init_logger("vllm.rc")


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


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives checkpoint-format weights over gloo into CPU buffers and loads them by vLLM's layerwise reload."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: GlooGroup | None = None
        self._reloading = False

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group, leaving an earlier one (its trainer may have died)."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = GlooGroup.join(
            init_info.address, init_info.port, rank, init_info.world_size, init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        """Nothing yet: the model is touched when its weights have arrived."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a payload and load it. The base class would wait for an accelerator, which a CPU worker has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive every tensor, then reload the model from them.

        Raises:
            RuntimeError: No group, a broken connection (nothing was touched), or parameters that the payload left out.
            ValueError: A dtype that torch does not have, or a name that the model does not have.
        """
        if self._group is None:
            raise RuntimeError("no transfer group: init_weight_transfer_engine comes first")
        tensors = [
            (name, torch.empty(shape, dtype=_dtype(dtype)))
            for name, dtype, shape in zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)
        ]
        self._group.begin_round()
        for _, tensor in tensors:
            if prod(tensor.shape):
                self._group.broadcast(tensor)
        initialize_layerwise_reload(self.model)
        self._reloading = True
        loaded = self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)
        if loaded is not None:
            missing = sorted({name for name, _ in self.model.named_parameters()} - set(loaded))
            if missing:
                raise RuntimeError(f"the payload leaves out {len(missing)} parameters of the model: {', '.join(missing[:8])}")

    def finish_weight_update(self) -> None:
        """End the reload: attention scales and whatever else is derived from weights."""
        if self._reloading:
            self._reloading = False
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype
