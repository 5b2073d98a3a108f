"""Crashes of either side, on real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import rc
from harness.artifact import Experiment
from harness.crash_recovery import crash_recovery
from harness.engines import running_engine
from rc.effects.process import free_port
from rc.effects.protocol import EngineAdapter, WeightSource
from rc.effects.transfer import VllmWeightTransfer
from rc.errors import EngineTainted, UpdateTainted
from rc.evidence import InstallReport
from rc.lifecycle import Phase


class EngineDiesInMidInstall(VllmWeightTransfer):
    """The whole server is killed once its weight update has begun."""

    def __init__(self, process_group: int) -> None:
        super().__init__()
        self._process_group = process_group

    async def install(self, engine: EngineAdapter, weights: WeightSource, label: str) -> InstallReport:
        os.killpg(self._process_group, signal.SIGKILL)
        return await super().install(engine, weights, label)


async def test_an_engine_that_dies_in_mid_update_is_tainted_and_serves_again_after_a_restart_and_an_install(
    policy_directory: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    port, journal = free_port(), tmp_path / "run.db"
    async with running_engine(policy_directory, tmp_path / "first.log", port=port) as first:
        dying = EngineDiesInMidInstall(first.pid)
        async with rc.Controller.open(journal, engine=first.url, transfer=dying) as control:
            with pytest.raises(UpdateTainted):
                await control.update(rc.WeightIdentity(run="r", step=1), rc.ModuleWeights(model))
            with pytest.raises(EngineTainted, match="restart its server process"):
                async with control.rollout():
                    pytest.fail("it was admitted")
            published = control.published
            assert published is not None
            assert published.version == 0, "the target was not published"
    async with (
        running_engine(policy_directory, tmp_path / "second.log", port=port) as second,
        rc.Controller.open(journal, engine=second.url) as control,
    ):
        assert control.state.engine(second.url).phase is Phase.JOINED
        assert not control.serving
        commit = await control.update(rc.WeightIdentity(run="r", step=1), rc.ModuleWeights(model))
        assert commit.version == 2, "the number of the tainted update is not used again"
        async with control.rollout() as rollout:
            turn = await rollout.generate([1, 5, 6, 7], max_tokens=4)
        assert [span.label for span in turn.spans] == ["rc-2"]


async def test_a_demo_that_is_killed_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    experiment = Experiment("crash_recovery", profile="stock")
    await crash_recovery(experiment, tmp_path / "run", kills=2, seed=1, steps=5)
    assert experiment.passed
