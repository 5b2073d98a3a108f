"""What runs inside vLLM's processes, each of which calls `register` through the ``vllm.general_plugins`` entry point.

The core never imports this package, and importing it imports neither torch nor vllm.
"""

from __future__ import annotations

from typing import Final

__all__ = ("GLOO_BACKEND", "register")

GLOO_BACKEND: Final = "rc_gloo"
"""Name of the backend for ``--weight-transfer-config '{"backend": "rc_gloo"}'``."""


def register() -> None:
    """Make `GLOO_BACKEND` known to vLLM's weight-transfer factories; doing so twice changes nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    # vLLM has no way to ask whether a name is taken; registering it again is an error.
    if GLOO_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            GLOO_BACKEND, "rc.vllm_plugin.gloo_engine", "GlooWeightTransferEngine"
        )
    if GLOO_BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(
            GLOO_BACKEND, "rc.vllm_plugin.gloo_trainer", "GlooTrainerWeightTransferEngine"
        )
