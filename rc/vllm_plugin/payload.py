"""What a payload must hold before a worker may touch its model.

vLLM's own loading does not say that something is missing: a fused ``qkv_proj`` counts as loaded when ``k_proj`` was
left out, and a tied head keeps its old values. So a worker compares what is announced with the checkpoint that it was
started from.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rc.errors import InvalidWeights
from rc.versions import Manifest
from rc.weights import checkpoint_manifest

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

__all__ = ("PayloadRules", "served_manifest", "tied_heads")

# A child of vLLM's logger, so that it goes where the engine's log goes.
logger = logging.getLogger("vllm.rc")

_NAMED: Final = 8
"""Problems that a refusal lists; one wrong payload may have thousands."""


class PayloadRules:
    """What a worker asks of every payload.

    Args:
        expected: Parameters of the checkpoint that is served; None where its files cannot be read.
        heads: Heads that share their weight with the embedding, by the engine's names, e.g. ``lm_head``.
    """

    def __init__(self, expected: Manifest | None, heads: tuple[str, ...]) -> None:
        self._expected = expected
        self._heads = tuple(f"{head}.weight" for head in heads)

    def check(self, announced: Manifest) -> None:
        """Raise `InvalidWeights` where parameters are missing, unknown, or of another dtype or shape."""
        names = frozenset(spec.name for spec in announced.parameters)
        sent_heads = frozenset(name for name in names if name.endswith(self._heads))
        problems = [
            f"{head} is missing: it is tied to the embedding, and vLLM keeps the old head unless it is sent as well"
            for head in self._heads
            if not any(name.endswith(head) for name in names)
        ]
        if self._expected is not None:
            problems += announced.problems_against(self._expected, optional=sent_heads)
        if problems:
            more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
            raise InvalidWeights(f"payload refused, nothing was loaded: {'; '.join(problems[:_NAMED])}{more}")


def served_manifest(vllm_config: VllmConfig) -> Manifest | None:
    """Read the parameters of the checkpoint that this engine serves, from disk or from the Hugging Face cache."""
    directory = _checkpoint_directory(vllm_config)
    try:
        manifest = None if directory is None else checkpoint_manifest(directory)
    except InvalidWeights as error:
        logger.warning("rc: %s", error)
        manifest = None
    if manifest is None:
        logger.warning(
            "rc: no safetensors of %s to compare payloads with; a part missing from a fused parameter goes unnoticed",
            vllm_config.model_config.model,
        )
    return manifest


def _checkpoint_directory(vllm_config: VllmConfig) -> Path | None:
    model = vllm_config.model_config.model
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        cached = snapshot_download(
            model,
            revision=vllm_config.model_config.revision,
            cache_dir=vllm_config.load_config.download_dir,
            local_files_only=True,
        )
    except (OSError, ValueError):
        return None
    return Path(cached)


def tied_heads(model: torch.nn.Module) -> tuple[str, ...]:
    """Name the output heads whose weight is the embedding's."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = {
        id(getattr(module, "weight", None))
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    } - {id(None)}
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, ParallelLMHead) and id(getattr(module, "weight", None)) in embeddings
    )
