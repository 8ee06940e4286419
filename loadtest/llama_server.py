"""The real llama.cpp server with the tests' tiny random DeepSeek-V2 model, as a child process.

``python llama_server.py DIRECTORY`` with the repository's ``tests`` folder in PYTHONPATH writes
the model into the directory and prints ``ready port=PORT``.
"""

import signal
import sys
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import xllamacpp
from support.tiny_model import write_model

MODEL: Final = "deepseek-tiny"
SLOTS: Final = 8
_CONTEXT_TOKENS: Final = 4096


def main(directory: Path) -> None:
    """Serve on a free port of 127.0.0.1 until SIGTERM."""
    file = directory / "tiny.gguf"
    write_model(file)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    parameters.model_alias = {MODEL}
    parameters.n_parallel = SLOTS
    parameters.n_ctx = SLOTS * _CONTEXT_TOKENS
    parameters.cpuparams.n_threads = 1
    parameters.cpuparams_batch.n_threads = 1
    parameters.endpoint_metrics = True
    parameters.offline = True
    server = xllamacpp.Server(parameters)
    print(f"ready port={urlsplit(server.listening_address).port}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
