"""Fixtures that start gateways and stubs, for every suite below."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.gateway import Config, Gateway, Start
from support.upstream import Stubs, Upstream

# For `loadtest`; last, so that the installed package is tested and not the sources beside it.
sys.path.append(str(Path(__file__).parent.parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "line(*numbers): the lines of tests/conformance/README.md that a test shows"
    )


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start gateways; all are stopped, and their logs looked through, at the end."""
    with ExitStack() as stack:

        def _start(settings: Config, **options: Any) -> Gateway:
            directory = tmp_path_factory.mktemp("gateway")
            return stack.enter_context(Gateway(settings, directory, **options))

        yield _start


@pytest.fixture
def stubs() -> Iterator[Stubs]:
    """Make stubs; all are closed at the end."""
    with ExitStack() as stack:

        def _stub(**options: Any) -> Upstream:
            return stack.enter_context(Upstream(**options))

        yield _stub
