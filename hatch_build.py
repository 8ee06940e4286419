"""Compiles the data path with mypyc when a wheel is built.

The sources stay plain Python and run as such: in an editable install, where CIUICFLOW_PURE=1 is
set, and where there is no C compiler or no Python.h. Compiled, a request costs about half the
Python time.
"""

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What runs for every request. Modules that define msgspec records are left out: mypyc cannot
# compile their metaclass.
COMPILED = [
    "ciuicflow/flowcontrol/bounds.py",
    "ciuicflow/flowcontrol/controller.py",
    "ciuicflow/flowcontrol/cost_model.py",
    "ciuicflow/flowcontrol/entry.py",
    "ciuicflow/flowcontrol/flight.py",
    "ciuicflow/flowcontrol/lanes.py",
    "ciuicflow/flowcontrol/ledger.py",
    "ciuicflow/flowcontrol/limit.py",
    "ciuicflow/flowcontrol/measure.py",
    "ciuicflow/flowcontrol/placement.py",
    "ciuicflow/flowcontrol/prefill.py",
    "ciuicflow/flowcontrol/queue.py",
    "ciuicflow/flowcontrol/shares.py",
    "ciuicflow/flowcontrol/topology.py",
    "ciuicflow/gateway/admission.py",
    "ciuicflow/gateway/deadlines.py",
    "ciuicflow/gateway/endpoints.py",
    "ciuicflow/gateway/flow_pick.py",
    "ciuicflow/gateway/framing.py",
    "ciuicflow/gateway/handler.py",
    "ciuicflow/gateway/headers.py",
    "ciuicflow/gateway/inbox.py",
    "ciuicflow/gateway/pool.py",
    "ciuicflow/gateway/relay.py",
    "ciuicflow/gateway/server.py",
    "ciuicflow/gateway/meter.py",
    "ciuicflow/gateway/optin.py",
    "ciuicflow/gateway/upstream.py",
    "ciuicflow/observability/quantiles.py",
    "ciuicflow/observability/traffic.py",
    "ciuicflow/runtime/dispatcher.py",
]


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the compiled modules to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or say why not."""
        if version == "editable" or os.environ.get("CIUICFLOW_PURE") == "1":
            return
        missing = _missing()
        if missing:
            self.app.display_warning(f"{missing} not found: the wheel is plain Python, and slower")
            return
        os.chdir(self.root)
        directory = Path(tempfile.mkdtemp(prefix="ciuicflow-build-"))
        self._directory = directory
        self._compile(directory)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for module in (directory / "lib").rglob("*.so"):
            build_data["force_include"][str(module)] = str(module.relative_to(directory / "lib"))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made on the way."""
        shutil.rmtree(getattr(self, "_directory", ""), ignore_errors=True)

    def _compile(self, directory: Path) -> None:
        from mypyc.build import mypycify
        from setuptools import Distribution
        from setuptools.command.build_ext import build_ext

        extensions = mypycify(
            # A build's environment lacks the dependencies: what lies outside is not judged here.
            ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent", *COMPILED],
            opt_level="3",
            debug_level="0",
            target_dir=str(directory / "c"),
        )
        command = build_ext(Distribution({"name": "ciuicflow", "ext_modules": extensions}))
        command.build_lib = str(directory / "lib")
        command.build_temp = str(directory / "temp")
        command.ensure_finalized()
        command.run()


def _missing() -> str:
    """Return what compiling needs and is not here; empty: all is here."""
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    compiler = compiler.split()[0]
    if not shutil.which(compiler):
        return f"the C compiler {compiler}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h"
    return ""
