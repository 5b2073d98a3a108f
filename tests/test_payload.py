"""What a worker asks of a payload before it touches its model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rc.errors import InvalidWeights
from rc.versions import Manifest, ParameterSpec
from rc.vllm_plugin.payload import PayloadRules, served_manifest
from tests.test_weights import write_safetensors


def manifest(*names: str, dtype: str = "bfloat16", shape: tuple[int, ...] = (2, 2)) -> Manifest:
    return Manifest.of(ParameterSpec(name=name, dtype=dtype, shape=shape) for name in names)


SERVED = manifest("embed.weight", "q.weight", "k.weight", "v.weight")


def test_a_payload_with_exactly_the_served_parameters_is_taken() -> None:
    PayloadRules(SERVED, ()).check(SERVED)


@pytest.mark.parametrize(
    ("announced", "problem"),
    [
        (manifest("embed.weight", "q.weight", "v.weight"), "k.weight is missing"),
        (manifest("embed.weight", "q.weight", "k.weight", "v.weight", "o.weight"), "o.weight is not a parameter"),
        (manifest("embed.weight", "q.weight", "k.weight", "v.weight", "lm_head.weight"), "lm_head.weight is not"),
        (
            manifest("embed.weight", "q.weight", "k.weight", "v.weight", shape=(2, 3)),
            r"embed.weight has shape \[2, 3\]",
        ),
        (manifest("embed.weight", "q.weight", "k.weight", "v.weight", dtype="float32"), "has dtype float32"),
    ],
)
def test_a_payload_that_differs_is_refused_and_the_difference_named(announced: Manifest, problem: str) -> None:
    with pytest.raises(InvalidWeights, match=f"nothing was loaded: .*{problem}"):
        PayloadRules(SERVED, ()).check(announced)


def test_a_tied_head_must_be_sent_although_no_checkpoint_lists_it() -> None:
    rules = PayloadRules(SERVED, ("lm_head",))
    with pytest.raises(InvalidWeights, match=r"lm_head\.weight is missing: it is tied"):
        rules.check(SERVED)
    rules.check(Manifest.of([*SERVED.parameters, *manifest("lm_head.weight").parameters]))


def test_a_tied_head_inside_a_wrapped_model_is_known_by_its_last_name() -> None:
    rules = PayloadRules(manifest("language_model.embed.weight"), ("lm_head",))
    rules.check(manifest("language_model.embed.weight", "language_model.lm_head.weight"))


def test_a_tied_head_is_asked_for_where_the_checkpoint_cannot_be_read() -> None:
    PayloadRules(None, ()).check(manifest("whatever"))
    with pytest.raises(InvalidWeights, match=r"lm_head\.weight is missing"):
        PayloadRules(None, ("lm_head",)).check(manifest("whatever"))


def test_a_refusal_stays_readable_when_everything_is_wrong() -> None:
    with pytest.raises(InvalidWeights, match=r"and 192 more$") as refusal:
        PayloadRules(manifest(*(f"layer.{index}" for index in range(200))), ()).check(Manifest(parameters=()))
    assert str(refusal.value).count("is missing") == 8


# ---------------------------------------------------------------------------------- where the engine's checkpoint lies


def config(model: str, download_dir: str | None = None) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision=None), load_config=SimpleNamespace(download_dir=download_dir)
    )


def test_a_local_checkpoint_is_read_from_its_directory(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": ("F32", [1])})
    assert served_manifest(config(str(tmp_path))) == manifest("a", dtype="float32", shape=(1,))


def test_a_model_from_the_hub_is_read_from_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    write_safetensors(snapshot / "model.safetensors", {"a": ("F32", [1])})
    assert served_manifest(config("org/name", str(tmp_path))) == manifest("a", dtype="float32", shape=(1,))


@pytest.mark.parametrize("damage", ["nothing there", "no safetensors", "not safetensors"])
def test_an_engine_whose_checkpoint_cannot_be_read_says_what_goes_unnoticed(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("huggingface_hub")
    model = str(tmp_path)
    if damage == "nothing there":
        model = "org/name"
    elif damage == "not safetensors":
        (tmp_path / "model.safetensors").write_bytes(b"")
    assert served_manifest(config(model, str(tmp_path / "cache"))) is None
    assert "a part missing from a fused parameter goes unnoticed" in caplog.text
