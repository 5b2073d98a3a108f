"""Weights on the trainer's side: a torch module as the source of an update, and the manifest of a checkpoint on disk.

Importing this needs no torch; `ModuleWeights` imports it when it is made, by when its caller has a module anyway.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rc.errors import InvalidWeights
from rc.versions import Manifest, ParameterSpec

if TYPE_CHECKING:
    import torch

__all__ = ("ModuleWeights", "checkpoint_manifest")


class ModuleWeights:
    """The parameters and persistent buffers of a torch module, as an update's weights.

    A head that is tied to the embedding is sent under its own name as well: vLLM's CPU backend packs it separately, and
    would keep the old head without an error.

    Args:
        model: A causal language model, e.g. from transformers, on any device.
        dtype: Send floating-point parameters in this dtype, e.g. ``torch.bfloat16`` for a float32 trainer. Default: as
            they are.
        allow_nan: Publish NaN and infinite values instead of refusing them.

    The tensors are read while the update runs: do not step the optimizer before `Controller.update` has returned.
    """

    def __init__(self, model: torch.nn.Module, *, dtype: torch.dtype | None = None, allow_nan: bool = False) -> None:
        self._model = model
        self._dtype = dtype
        self._allow_nan = allow_nan
        self._tied_head = _tied_head(model)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `manifest` lists, in its order: detached, contiguous, in the dtype that is sent."""
        for name, parameter in self._named():
            yield name, parameter.detach().to(self._sent_dtype(parameter)).contiguous()

    def manifest(self) -> Manifest:
        """Names, dtypes and shapes of what `tensors` yields."""
        return Manifest.of(
            ParameterSpec(
                name=name,
                dtype=str(self._sent_dtype(parameter)).removeprefix("torch."),
                shape=tuple(parameter.shape),
            )
            for name, parameter in self._named()
        )

    def optional(self) -> frozenset[str]:
        """The tied head, which a checkpoint does not list."""
        return frozenset() if self._tied_head is None else frozenset({self._tied_head[0]})

    def problems(self) -> tuple[str, ...]:
        """Name every parameter that holds NaN or infinity, unless that was allowed."""
        import torch

        if self._allow_nan:
            return ()
        return tuple(
            f"{name} holds NaN or infinite values (ModuleWeights(..., allow_nan=True) publishes them all the same)"
            for name, tensor in self.tensors()
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
        )

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        named: list[tuple[str, torch.Tensor]] = [*self._model.named_parameters(), *_persistent_buffers(self._model)]
        if self._tied_head is not None:
            named.append(self._tied_head)
        return sorted(named, key=itemgetter(0))

    def _sent_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and parameter.is_floating_point() else parameter.dtype


def _persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint holds, such as a mixture of experts' routing bias; rotary caches are not among them."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _tied_head(model: torch.nn.Module) -> tuple[str, torch.nn.Parameter] | None:
    """The output embedding's name and parameter, where it shares them with the input embedding."""
    output: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if output is None or not hasattr(output, "weight"):
        return None
    own_names = {name for name, _ in model.named_parameters()}
    for name, module in model.named_modules():
        if module is output and f"{name}.weight" not in own_names:
            return f"{name}.weight", output.weight
    return None


_SAFETENSORS_DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip

_MAX_HEADER_BYTES: Final = 100_000_000
"""What the safetensors format allows; a larger length is not a header."""


def checkpoint_manifest(directory: str | Path) -> Manifest | None:
    """Read which parameters a checkpoint holds from the headers of its safetensors files.

    A directory with an index has the files that the index names; others beside them (``consolidated.safetensors``) hold
    the same weights under other names.

    Returns:
        The manifest, or None where the directory holds no safetensors.

    Raises:
        InvalidWeights: A file is missing, is not safetensors, or has a dtype that rc does not know.
    """
    specs = [spec for file in _weight_files(Path(directory)) for spec in _header(file)]
    return Manifest.of(specs) if specs else None


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            return [directory / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidWeights(f"{index} cannot be read ({type(error).__name__}: {error})") from error
    single = directory / "model.safetensors"
    return [single] if single.exists() else sorted(directory.glob("*.safetensors"))


def _header(file: Path) -> Iterator[ParameterSpec]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                dtype = _SAFETENSORS_DTYPES[entry["dtype"]]
                yield ParameterSpec(name=name, dtype=dtype, shape=tuple(entry["shape"]))
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise InvalidWeights(f"{file} cannot be read as safetensors ({type(error).__name__}: {error})") from error
