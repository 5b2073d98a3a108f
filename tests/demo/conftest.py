"""What the tests of the demo's learning part share. They need torch, and are left out where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]


@pytest.fixture(scope="session")
def small_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a directory with the small policy of seed 0; copy it before changing anything."""
    from rc.demo.policy import build_small_policy

    directory = tmp_path_factory.mktemp("policies") / "seed0"
    build_small_policy(directory, seed=0)
    return directory


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Keep torch from spinning on cores that it shares: matrices this small gain nothing from a second thread."""
    import torch

    torch.set_num_threads(1)
