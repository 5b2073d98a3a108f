"""The worker's side of the ``rc_gloo`` backend: receive everything, check it, and only then touch the model.

The session is vLLM's own (start, update, finish, with its layerwise reload), but the reload begins when the whole
payload is there: a payload that does not fit, or a sender that dies in the middle, leaves an error and the model as it
was. Only a failure after that leaves a model in pieces; it then takes no further update, because vLLM's reload would
count what the failed one had loaded.

Receiving first costs a second copy of the weights in CPU memory while an update lasts.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rc.vllm_plugin.gloo_group import GlooGroup
from rc.vllm_plugin.gloo_messages import GlooInitInfo, GlooUpdateInfo
from rc.vllm_plugin.payload import PayloadRules, served_manifest, tied_heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

__all__ = ("GlooWeightTransferEngine",)


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives checkpoint-format weights over gloo into CPU buffers and loads them by vLLM's layerwise reload."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rules = PayloadRules(served_manifest(vllm_config), tied_heads(model))
        self._group: GlooGroup | None = None
        self._model_state: Literal["whole", "in pieces", "loaded"] = "whole"

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group, leaving an earlier one (its trainer may have died)."""
        self.shutdown()
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = GlooGroup.join(init_info.address, init_info.port, rank, init_info.world_size, init_info.timeout_s)

    def start_weight_update(self) -> None:
        """Check that the model is whole; it is touched when its weights have arrived."""
        self._expect_whole()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a payload and load it. The base class would wait for an accelerator, which a CPU worker has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive every tensor, then reload the model from them.

        Raises:
            InvalidWeights: The payload does not fit the checkpoint that is served; nothing was received or touched.
            RuntimeError: No group, a broken connection (nothing was touched), or parameters that vLLM did not load.
        """
        self._expect_whole()
        try:
            self._rules.check(update_info.manifest())
            tensors = self._receive(update_info)
        except BaseException:
            # A trainer in the middle of a broadcast sees the connection break, and need not wait for its timeout.
            self.shutdown()
            raise
        self._load(tensors)

    def _receive(self, update_info: GlooUpdateInfo) -> list[tuple[str, torch.Tensor]]:
        if self._group is None:
            raise RuntimeError("no transfer group: init_weight_transfer_engine comes first")
        tensors = update_info.buffers()
        self._group.begin_round()
        for _, tensor in tensors:
            if prod(tensor.shape):
                self._group.broadcast(tensor)
        return tensors

    def _load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        self._model_state = "in pieces"
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights((name, tensor.to(self.device)) for name, tensor in tensors)
        if loaded is not None:
            missing = sorted({name for name, _ in self.model.named_parameters()} - set(loaded))
            if missing:
                raise RuntimeError(f"vLLM did not load {len(missing)} of its parameters: {', '.join(missing[:8])}")
        self._model_state = "loaded"

    def finish_weight_update(self) -> None:
        """End the reload: attention scales and whatever else is derived from weights.

        Raises:
            RuntimeError: No payload was loaded, so there is nothing that a new label could stand for.
        """
        if self._model_state != "loaded":
            raise RuntimeError(f"no payload was loaded in this update, the model is {self._model_state}")
        self._model_state = "in pieces"
        finalize_layerwise_reload(self.model, self.model_config)
        self._model_state = "whole"

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _expect_whole(self) -> None:
        if self._model_state != "whole":
            raise RuntimeError(
                f"the model is {self._model_state}: an earlier update did not end, and loading over its remains could "
                f"mix both without an error. Restart the engine"
            )
