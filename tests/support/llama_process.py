"""llama.cpp's server as a child process. Run as `python llama_process.py MODEL`."""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main(model: str) -> None:
    """Serve on a free port of 127.0.0.1, say its URL on stdout, until killed."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    parameters.model_alias = {"deepseek-tiny"}
    parameters.n_parallel = 4
    parameters.n_ctx = 4 * 32768
    parameters.cpuparams.n_threads = 1
    parameters.cpuparams_batch.n_threads = 1
    parameters.endpoint_metrics = True
    parameters.endpoint_slots = True
    parameters.offline = True
    server = xllamacpp.Server(parameters)
    print(f"serving {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
