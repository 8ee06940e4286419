"""Tests that replace parts of what they look at: compiled classes do not let them."""

import pytest

from ciuicflow.flowcontrol import controller

needs_plain = pytest.mark.skipif(
    not str(controller.__file__).endswith(".py"),
    reason="the package is compiled; `make pure` runs this against the plain sources",
)
