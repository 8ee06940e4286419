"""A real engine (llama.cpp with a tiny DeepSeek-V2 model) and the real gateway before it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import llama
from support.gateway import LOOPS, Gateway, config


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[llama.Engine]:
    if sys.platform != "linux":
        pytest.skip("llama.cpp's wheel is installed on Linux only")
    directory: Path = tmp_path_factory.mktemp("engine")
    with llama.running(directory) as engine:
        yield engine


@pytest.fixture(scope="module", params=LOOPS)
def gateway(
    engine: llama.Engine, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("gateway")
    with Gateway(config(engine.url), directory, loop=request.param) as gateway:
        yield gateway
