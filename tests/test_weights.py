"""What a trainer sends, and what a checkpoint's headers say that an engine holds."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from rc.errors import InvalidWeights
from rc.versions import Manifest, ParameterSpec
from rc.weights import ModuleWeights, checkpoint_manifest


def write_safetensors(path: Path, parameters: dict[str, tuple[str, list[int]]]) -> None:
    """Write a file in the format's own words: header length, header, and as many bytes as it declares."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in parameters.items():
        size = {"F32": 4, "BF16": 2}.get(dtype, 1)
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(end))


# ---------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_read_from_its_header_alone(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"b": ("BF16", [2, 3]), "a": ("F32", [])})
    assert checkpoint_manifest(tmp_path) == Manifest(
        parameters=(
            ParameterSpec(name="a", dtype="float32", shape=()),
            ParameterSpec(name="b", dtype="bfloat16", shape=(2, 3)),
        )
    )


def test_an_index_says_which_files_belong_to_the_checkpoint(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("F32", [1])})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F32", [2])})
    write_safetensors(tmp_path / "consolidated.safetensors", {"layers.a": ("F32", [1])})
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    manifest = checkpoint_manifest(tmp_path)
    assert manifest is not None
    assert [spec.name for spec in manifest.parameters] == ["a", "b"]


def test_other_files_beside_a_single_checkpoint_are_not_part_of_it(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ("F32", [1])})
    write_safetensors(tmp_path / "optimizer.safetensors", {"moments": ("F32", [1])})
    manifest = checkpoint_manifest(tmp_path)
    assert manifest is not None
    assert [spec.name for spec in manifest.parameters] == ["a"]


def test_a_directory_without_safetensors_has_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert checkpoint_manifest(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x00",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 40) + b'{"a": {"dtype": "F4", "shape": [1]}}    ',
        struct.pack("<Q", 30) + b'{"a": {"dtype": "F32"}}       ',
    ],
    ids=["empty", "short", "absurd length", "not an object", "unknown dtype", "no shape"],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidWeights, match=r"model\.safetensors cannot be read"):
        checkpoint_manifest(tmp_path)


def test_a_shard_that_is_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidWeights, match=r"model-00001-of-00001\.safetensors cannot be read"):
        checkpoint_manifest(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"weight_map": []}'])
def test_a_damaged_index_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(InvalidWeights, match=r"index\.json cannot be read"):
        checkpoint_manifest(tmp_path)


# ---------------------------------------------------------------------------------- modules


class TestModules:
    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.fixture
    def model(self, torch: Any) -> Any:
        """A language model in miniature, with transformers' names for what rc looks at; its head is tied."""

        class Model(torch.nn.Module):  # type: ignore[misc]  # torch is a fixture here
            def __init__(self) -> None:
                super().__init__()
                self.embed = torch.nn.Embedding(4, 3)
                self.norm = torch.nn.LayerNorm(3)
                self.lm_head = torch.nn.Linear(3, 4, bias=False)
                self.lm_head.weight = self.embed.weight
                self.register_buffer("bias", torch.ones(2))
                self.register_buffer("counter", torch.tensor(7))
                self.register_buffer("rotary", torch.ones(2), persistent=False)

            def get_output_embeddings(self) -> Any:
                return self.lm_head

        return Model()

    def test_everything_a_checkpoint_would_hold_is_sent_and_a_tied_head_as_well(self, model: Any) -> None:
        weights = ModuleWeights(model)
        names = [spec.name for spec in weights.manifest().parameters]
        assert names == ["bias", "counter", "embed.weight", "lm_head.weight", "norm.bias", "norm.weight"]
        assert weights.optional() == {"lm_head.weight"}

    def test_a_head_of_its_own_is_sent_once_and_is_not_optional(self, model: Any, torch: Any) -> None:
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(4, 3))
        weights = ModuleWeights(model)
        names = [spec.name for spec in weights.manifest().parameters]
        assert names.count("lm_head.weight") == 1
        assert weights.optional() == frozenset()

    def test_the_manifest_lists_what_is_sent_in_its_order(self, model: Any, torch: Any) -> None:
        weights = ModuleWeights(model, dtype=torch.bfloat16)
        sent = [
            ParameterSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in weights.tensors()
        ]
        assert tuple(sent) == weights.manifest().parameters

    def test_floating_point_is_cast_and_integers_are_not(self, model: Any, torch: Any) -> None:
        tensors = dict(ModuleWeights(model, dtype=torch.bfloat16).tensors())
        assert tensors["norm.weight"].dtype == tensors["bias"].dtype == torch.bfloat16
        assert tensors["counter"].dtype == torch.int64
        assert dict(ModuleWeights(model).tensors())["norm.weight"].dtype == torch.float32

    def test_tensors_can_be_sent_as_bytes(self, model: Any, torch: Any) -> None:
        model.embed.weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4).T)
        tensor = dict(ModuleWeights(model).tensors())["embed.weight"]
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert torch.equal(tensor, model.embed.weight)

    @pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
    def test_a_value_that_is_not_finite_is_named_unless_allowed(self, model: Any, torch: Any, value: str) -> None:
        assert ModuleWeights(model).problems() == ()
        with torch.no_grad():
            model.norm.bias[1] = float(value)
        (problem,) = ModuleWeights(model).problems()
        assert problem.startswith("norm.bias holds NaN or infinite values")
        assert ModuleWeights(model, allow_nan=True).problems() == ()

    def test_a_value_that_overflows_in_the_dtype_that_is_sent_is_named(self, model: Any, torch: Any) -> None:
        with torch.no_grad():
            model.norm.bias[1] = 1e6
        assert ModuleWeights(model, dtype=torch.bfloat16).problems() == ()
        assert len(ModuleWeights(model, dtype=torch.float16).problems()) == 1
