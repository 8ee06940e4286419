"""What every test below may use."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "line(*numbers): the lines of tests/conformance/README.md that a test shows"
    )
