"""Both ends of the gloo backend in one process, with a stand-in for the model: what is touched, and what refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rc.errors import InvalidWeights
from rc.versions import Manifest, ParameterSpec
from rc.vllm_plugin import GLOO_BACKEND, register
from rc.vllm_plugin.payload import PayloadRules

with warnings.catch_warnings():
    # Importing vLLM's model loading makes torch warn about its own deprecations.
    warnings.simplefilter("ignore")
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from rc.vllm_plugin import gloo_engine
    from rc.vllm_plugin.gloo_engine import GlooWeightTransferEngine
    from rc.vllm_plugin.gloo_trainer import GlooTrainerInitInfo, GlooTrainerWeightTransferEngine

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "empty": torch.empty(0)}

SPECS = Manifest.of(
    ParameterSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
    for name, tensor in TENSORS.items()
)


class Model(torch.nn.Module):
    """Loads by name as vLLM's models do, and says what it loaded."""

    def __init__(self, touched: list[str]) -> None:
        super().__init__()
        self.values: dict[str, torch.Tensor] = {}
        self.fails = False
        self.skips: str | None = None
        self._touched = touched
        for name, tensor in TENSORS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros_like(tensor)))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        self._touched.append("load")
        if self.fails:
            raise RuntimeError("a loader failed")
        loaded = {name: tensor for name, tensor in weights if name != self.skips}
        self.values = loaded
        return set(loaded)


class World:
    """A worker's engine and a trainer that calls it directly."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 5.0) -> None:
        self.touched: list[str] = []
        monkeypatch.setattr(gloo_engine, "initialize_layerwise_reload", lambda model: self.touched.append("begin"))
        monkeypatch.setattr(gloo_engine, "finalize_layerwise_reload", lambda model, config: self.touched.append("end"))
        monkeypatch.setattr(gloo_engine, "served_manifest", lambda config: SPECS)
        self.model = Model(self.touched)
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
        nothing: Any = None
        self.engine = GlooWeightTransferEngine(nothing, config, torch.device("cpu"), self.model)
        self.source = Source()
        self._timeout_s = timeout_s

    # What vLLM's routes do with each call.

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.engine.update_weights(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()

    def trainer(self) -> GlooTrainerWeightTransferEngine:
        register()
        info = GlooTrainerInitInfo(address="127.0.0.1", world_size=2, timeout_s=self._timeout_s, rank=0)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=self, source=self.source)
        assert isinstance(trainer, GlooTrainerWeightTransferEngine)
        return trainer


class Source(WeightSource):  # type: ignore[misc]  # vLLM is not analysed, so it is Any
    """The tensors; calls a hook before each."""

    def __init__(self) -> None:
        self.before: Callable[[int], None] = lambda index: None
        self.tensors = dict(TENSORS)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(self.tensors.items()):
            self.before(index)
            yield item


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_both_ends_are_known_to_vllm_however_often_they_are_registered() -> None:
    register()
    register()
    assert WeightTransferEngineFactory._registry[GLOO_BACKEND]() is GlooWeightTransferEngine
    assert WeightTransferTrainerFactory._registry[GLOO_BACKEND]() is GlooTrainerWeightTransferEngine


def test_the_model_gets_what_the_trainer_has_and_one_group_serves_many_updates(world: World) -> None:
    trainer = world.trainer()
    for step in range(3):
        world.source.tensors["a"] = TENSORS["a"] + step
        trainer.send_weights()
        assert torch.equal(world.model.values["a"], TENSORS["a"] + step)
        assert world.model.values["b"].dtype == torch.bfloat16
        assert trainer.may_have_loaded
    assert world.touched == ["begin", "load", "end"] * 3


def test_the_model_is_not_touched_before_everything_has_arrived(world: World) -> None:
    seen: list[tuple[bool, bool]] = []
    trainer = world.trainer()
    world.source.before = lambda index: seen.append((bool(world.touched), trainer.may_have_loaded))
    trainer.send_weights()
    assert seen[:2] == [(False, False), (False, False)]
    assert seen[2][1], "an empty tensor has no bytes to wait for: the worker may have begun"


def _without(name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in TENSORS.items() if other != name}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (_without("b"), "b is missing"),
        ({**TENSORS, "c": torch.ones(1)}, "c is not a parameter"),
        ({**TENSORS, "a": torch.ones(3, 2)}, r"a has shape \[3, 2\]"),
        ({**TENSORS, "a": TENSORS["a"].double()}, "a has dtype float64"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_a_payload_that_does_not_fit_is_refused_untouched_and_a_good_one_taken_after_it(
    world: World, tensors: dict[str, torch.Tensor], said: str
) -> None:
    trainer = world.trainer()
    world.source.tensors = tensors
    with pytest.raises(InvalidWeights, match=said):
        trainer.send_weights()
    assert world.touched == []
    assert not trainer.may_have_loaded
    world.source.tensors = dict(TENSORS)
    world.trainer().send_weights()
    assert world.touched == ["begin", "load", "end"]


@pytest.mark.parametrize("dies_at", [0, 1])
def test_a_trainer_that_fails_in_the_middle_leaves_the_model_untouched(world: World, dies_at: int) -> None:
    def die(index: int) -> None:
        if index == dies_at:
            raise MemoryError("no memory for the next tensor")

    trainer = world.trainer()
    world.source.before = die
    with pytest.raises(RuntimeError, match=r"no memory for the next tensor; and the engine: .*Connection"):
        trainer.send_weights()
    assert world.touched == []
    assert not trainer.may_have_loaded


def test_a_trainer_that_falls_silent_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, timeout_s=0.5)
    woken = threading.Event()
    world.source.before = lambda index: None if index == 0 else _wait(woken)
    trainer = world.trainer()
    failed: list[str] = []
    update = world.engine.update_weights

    def update_weights(update_info: dict[str, Any]) -> None:
        try:
            update(update_info)
        except RuntimeError as error:
            failed.append(str(error))
            woken.set()
            raise

    monkeypatch.setattr(world.engine, "update_weights", update_weights)
    with pytest.raises(RuntimeError, match="Timed out"):
        trainer.send_weights()
    assert len(failed) == 1, "the worker gave up by itself"
    assert world.touched == []


def _wait(event: threading.Event) -> None:
    assert event.wait(10)


def test_a_model_that_was_left_in_pieces_takes_no_further_update(world: World) -> None:
    """A second load over a half-loaded model is where vLLM's reload can mix both without an error."""
    trainer = world.trainer()
    world.model.fails = True
    with pytest.raises(RuntimeError, match="a loader failed"):
        trainer.send_weights()
    assert trainer.may_have_loaded
    world.model.fails = False
    with pytest.raises(RuntimeError, match=r"in pieces: an earlier update did not end.*Restart the engine"):
        world.trainer().send_weights()
    assert world.touched == ["begin", "load"]
    with pytest.raises(RuntimeError, match="in pieces"):
        world.engine.update_weights({"names": [], "dtypes": [], "shapes": []})
    with pytest.raises(RuntimeError, match="no payload was loaded in this update, the model is in pieces"):
        world.engine.finish_weight_update()


def test_parameters_that_vllm_does_not_load_are_an_error(world: World) -> None:
    world.model.skips = "b"
    with pytest.raises(RuntimeError, match="vLLM did not load 1 of its parameters: b"):
        world.trainer().send_weights()


def test_an_update_without_a_payload_cannot_be_finished(world: World) -> None:
    """Else the engine would serve the old weights under a new label."""
    world.engine.start_weight_update()
    with pytest.raises(RuntimeError, match="no payload was loaded"):
        world.engine.finish_weight_update()


def test_an_update_takes_one_payload(world: World) -> None:
    trainer = world.trainer()
    finish = world.engine.finish_weight_update
    world.engine.finish_weight_update = lambda: None  # type: ignore[method-assign]  # the engine never hears of the end
    trainer.send_weights()
    with pytest.raises(RuntimeError, match="the model is loaded: an earlier update did not end"):
        trainer.send_weights()
    finish()
    assert world.touched == ["begin", "load", "end"]


def test_a_worker_without_a_group_says_what_comes_first(world: World) -> None:
    info = {"names": list(TENSORS), "dtypes": ["float32", "bfloat16", "float32"], "shapes": [[2, 3], [4], [0]]}
    with pytest.raises(RuntimeError, match="init_weight_transfer_engine comes first"):
        world.engine.update_weights(info)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"names": ["a"], "dtypes": [], "shapes": [[1]]}, "differ in length: 1, 0, 1"),
        ({"names": ["a", "a"], "dtypes": ["float32"] * 2, "shapes": [[1], [1]]}, "announced twice"),
        ({"names": ["a"]}, "Invalid update_info"),
    ],
)
def test_an_announcement_that_makes_no_sense_is_refused(world: World, info: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        world.engine.update_weights(info)


def test_a_dtype_that_torch_does_not_have_is_refused(world: World) -> None:
    world.engine._rules = PayloadRules(None, ())
    world.trainer()
    with pytest.raises(ValueError, match="torch has no dtype 'float3'"):
        world.engine.update_weights({"names": ["a"], "dtypes": ["float3"], "shapes": [[1]]})
