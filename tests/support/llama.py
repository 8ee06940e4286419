"""Start llama.cpp's server with the tiny model, and make sure that it really answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support import raw, wait
from support.tiny_model import write_model


class Engine:
    """A server that listens."""

    def __init__(self, url: str) -> None:
        self.url = url
        host, _, port = url.removeprefix("http://").partition(":")
        self.address: raw.Address = (host, int(port))

    def answers(self) -> bool:
        """Whether it says something to a prompt."""
        prompt = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":8}'
        answer = raw.fetch(self.address, "POST", "/v1/chat/completions", body=prompt)
        if answer.status != 200:
            return False
        return len(json.loads(answer.body)["choices"][0]["message"]["content"]) == 8

    def busy_slots(self) -> int:
        """How many requests it works on."""
        slots = json.loads(raw.fetch(self.address, "GET", "/slots").body)
        return sum(slot["is_processing"] for slot in slots)


@contextmanager
def running(directory: Path) -> Iterator[Engine]:
    """A server that has answered one request."""
    model = directory / "tiny.gguf"
    write_model(model)
    command = [sys.executable, str(Path(__file__).with_name("llama_process.py")), str(model)]
    with (directory / "engine.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().decode().removeprefix("serving ").strip()
        assert url.startswith("http://"), (directory / "engine.log").read_text()
        engine = Engine(url)
        wait.until(engine.answers, 20, "the engine answers")
        yield engine
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
