"""nginx as a plain reverse proxy: one worker, no buffering, no log, kept upstream connections.

``python -m ciuicflow.bench.nginx UPSTREAM_PORT DIRECTORY`` writes the configuration into the
directory, prints ``ready port=PORT`` and becomes nginx, which listens a moment later.
"""

import argparse
import ctypes
import os
import shutil
import signal
import socket
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# What a client or an upstream may hold open: as much as the benchmark opens, and some more.
_CONFIG = """\
daemon off;
worker_processes 1;
worker_rlimit_nofile 16384;
error_log stderr warn;
pid {directory}/nginx.pid;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  upstream engine {{
    server 127.0.0.1:{upstream_port};
    keepalive 128;
    keepalive_requests 1000000000;
  }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    keepalive_requests 1000000000;
    client_max_body_size 64m;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_request_buffering off;
      proxy_read_timeout 600s;
    }}
  }}
}}
"""


def find_nginx() -> str | None:
    """Return the path of nginx, or None; Debian keeps it where only root looks."""
    search = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
    return shutil.which("nginx", path=search)


def config_text(upstream_port: int, port: int, directory: Path) -> str:
    """Return the configuration."""
    return _CONFIG.format(upstream_port=upstream_port, port=port, directory=directory)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _become_nginx(executable: str, config_file: Path) -> None:
    # Its master, told to end, ends its worker; killed, it would leave the worker behind. So if
    # the benchmark is killed, the kernel shall tell the master to end.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(executable, [executable, "-e", "stderr", "-c", str(config_file)])


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ciuicflow.bench.nginx")
    parser.add_argument("upstream_port", type=int)
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    executable = find_nginx()
    if executable is None:
        raise SystemExit("nginx is not installed: apt-get install nginx")
    port = free_port()
    config_file = options.directory / "nginx.conf"
    config_file.write_text(config_text(options.upstream_port, port, options.directory))
    print(f"ready port={port}", flush=True)
    _become_nginx(executable, config_file)


if __name__ == "__main__":
    _main()
