"""One stub and one gateway process for each module and event loop; clean stub for each test."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.gateway import LOOPS, Gateway, config
from support.upstream import Upstream


@pytest.fixture(scope="module", params=LOOPS)
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def module_stub() -> Iterator[Upstream]:
    with Upstream() as stub:
        yield stub


@pytest.fixture(scope="module")
def module_gateway(
    module_stub: Upstream,
    loop: str,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Gateway]:
    """The module's gateway, with the config sections that the module names in SETTINGS."""
    sections: dict[str, Any] = getattr(request.module, "SETTINGS", {})
    directory = tmp_path_factory.mktemp("gateway")
    with Gateway(config(module_stub, **sections), directory, loop=loop) as gateway:
        yield gateway


@pytest.fixture
def upstream(module_stub: Upstream) -> Iterator[Upstream]:
    module_stub.reset()
    yield module_stub
    module_stub.reset()


@pytest.fixture
def gateway(upstream: Upstream, module_gateway: Gateway) -> Gateway:
    """The module's gateway in front of the clean stub."""
    return module_gateway
