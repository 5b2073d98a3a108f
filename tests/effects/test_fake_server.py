"""The fake server beside the routes of the vLLM that is installed: same paths, same methods, same answers."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from rc.effects.fake import FakeEngine
from rc.effects.fake_server import FakeServer

SOURCES = (
    "entrypoints/rl/online/api_router.py",
    "entrypoints/serve/dev/cache/api_router.py",
    "entrypoints/serve/instrumentator/basic.py",
    "entrypoints/serve/instrumentator/health.py",
    "entrypoints/openai/models/api_router.py",
    "entrypoints/scale_out/token_in_token_out/api_router.py",
)
NOT_ROUTERS = {"/metrics"}
"""Mounted as an application of its own."""


@pytest.fixture(scope="module")
def source() -> str:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed here")
    root = Path(spec.submodule_search_locations[0])
    return "\n".join((root / path).read_text() for path in SOURCES if (root / path).exists())


def test_every_route_of_the_fake_is_one_of_vllm(source: str) -> None:
    real = {(method.upper(), path) for method, path in re.findall(r'@router\.(get|post)\(\s*"([^"]+)"', source)}
    fake = {(method, path) for path, methods in FakeServer(FakeEngine())._routes.items() for method in methods}
    assert {route for route in fake - real if route[1] not in NOT_ROUTERS} == set()
    assert len(fake) > 15


@pytest.mark.parametrize(
    "answer",
    [
        '{"status": "paused"}',
        '{"status": "resumed"}',
        '{"is_paused": paused}',
        '{"weight_version": weight_version}',
        '{"success": bool(success)}',
        '{"success": True, "new_version": new_version}',
        '{"message": "Weight update started"}',
        '{"message": "Weights updated"}',
        '{"message": "Weight update finished"}',
        '{"world_size": world_size}',
        '{"error": f"Failed to pause generation: {err}"}',
    ],
)
def test_answers_are_those_of_vllm(source: str, answer: str) -> None:
    assert answer in source


def test_parameters_are_those_of_vllm(source: str) -> None:
    for name in ("init_info", "update_info", "weight_version", "new_version"):
        assert re.search(rf"{name}: Annotated\[.*Body\(embed=True\)\]", source)
    for name in ("mode", "clear_cache"):
        assert re.search(rf"{name}: Annotated\[\w+, Query\(\)\]", source)
