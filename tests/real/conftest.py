"""Real engines for tests marked nightly. TEST_VLLM_VENV names an environment with it; else
one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_process import Engines, VllmEngine

_engines = pytest.StashKey[Engines]()


@pytest.fixture(scope="session")
def _vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(tmp_path_factory.mktemp("vllm"))
    request.config.stash[_engines] = engines
    yield engines
    engines.stop()


@pytest.fixture
def vllm_engines(_vllm: Engines) -> Iterator[Callable[..., list[VllmEngine]]]:
    """``vllm_engines(2, block_size=64)``: that many real engines that are ready, shared between
    tests."""
    _vllm.handed_out.clear()
    yield _vllm.get
    _vllm.handed_out.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Adds the output of the engines to the report of a failed test."""
    report = yield
    if report.failed and _engines in item.config.stash:
        for engine in item.config.stash[_engines].handed_out:
            report.sections.append((f"vLLM on port {engine.port}", engine.said()))
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that need real engines as nightly."""
    for item in items:
        if "vllm_engines" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.nightly)
