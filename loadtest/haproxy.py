"""haproxy as a static limit with a FIFO queue: at most so many requests in the engine.

``python haproxy.py UPSTREAM_PORT LIMIT WAIT_S DIRECTORY`` writes the configuration into the
directory, prints ``ready port=PORT`` and becomes haproxy, which listens a moment later.
"""

import argparse
import ctypes
import os
import resource
import shutil
import signal
from pathlib import Path

from ciuicflow.bench.nginx import free_port

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MAX_CONNECTIONS = 16_384
_SPARE_FILES = 100

# abortonclose: who leaves while queued is forgotten. http-no-delay: events are passed on at once.
_CONFIG = """\
global
  maxconn {connections}
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
  timeout queue {wait_ms}ms
  option http-keep-alive
  option abortonclose
  option http-no-delay
  http-reuse safe
frontend clients
  bind 127.0.0.1:{port}
  default_backend engine
backend engine
  server engine 127.0.0.1:{upstream_port} maxconn {limit}
"""


def find_haproxy() -> str | None:
    """Return the path of haproxy, or None; Debian keeps it where only root looks."""
    search = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
    return shutil.which("haproxy", path=search)


def config_text(upstream_port: int, port: int, limit: int, wait_s: float) -> str:
    """Return the configuration."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _CONFIG.format(
        upstream_port=upstream_port,
        port=port,
        limit=limit,
        wait_ms=round(wait_s * 1000),
        connections=min(_MAX_CONNECTIONS, files // 2 - _SPARE_FILES),  # it refuses more
    )


def _main() -> None:
    parser = argparse.ArgumentParser(prog="haproxy.py")
    parser.add_argument("upstream_port", type=int)
    parser.add_argument("limit", type=int)
    parser.add_argument("wait_s", type=float)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    executable = find_haproxy()
    if executable is None:
        raise SystemExit("haproxy is not installed: apt-get install haproxy")
    port = free_port()
    file = options.directory / "haproxy.cfg"
    file.write_text(config_text(options.upstream_port, port, options.limit, options.wait_s))
    print(f"ready port={port}", flush=True)
    # Should the load test be killed, the kernel tells haproxy to end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(executable, [executable, "-db", "-f", str(file)])


if __name__ == "__main__":
    _main()
