"""Everything once with a real model: `make real MODEL=FILE.gguf`, any instruct model as people download it.

Logits against llama.cpp's, a chat, a conversation saved and resumed, replies that follow a schema, comparisons by both
engines, calls of tools. Not collected by pytest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from h2o_stream.base.progress import ignore
from h2o_stream.base.resources import python_manual
from h2o_stream.config import CacheConfig, ModelConfig
from h2o_stream.runtime.sources import ModelFile
from lab.tools import real_model
from tests import llama
from tests.serve_load import post
from tests.served import Running

TOKENS = 500
"""Tokens whose logits are compared."""

KL, TOP = 0.02, 0.95
"""Largest mean divergence from llama.cpp, in nats, and least share of tokens that both find most likely."""


def logits(model: Path, folder: Path) -> str:
    """Our steps' logits against llama.cpp's, which rounds activations to 8 bits."""
    source = ModelFile(str(model), model, "float32")
    tokenizer, _ = source.tokenizer()
    tokens = [*tokenizer(python_manual()[:8000])["input_ids"]][:TOKENS]
    theirs = _log_softmax(llama.logits(model, tokens))
    described = source.describe(ignore, lambda note: None)
    served = source.model(described).serve(CacheConfig("recent", window=TOKENS))
    ours = _log_softmax(numpy.stack([served.forward([token]) for token in tokens]))
    divergence = (numpy.exp(theirs) * (theirs - ours)).sum(-1)
    top = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    assert divergence[1:].mean() < KL, divergence
    assert top > TOP, top
    return f"mean KL {divergence[1:].mean():.4f} (first token {divergence[0]:.4f}), same top token in {top:.1%}"


def _log_softmax(rows: Any) -> Any:
    shifted = rows.astype(numpy.float64) - rows.max(-1, keepdims=True)
    return shifted - numpy.log(numpy.exp(shifted).sum(-1, keepdims=True))


def chat(*engine: str) -> Callable[[Path, Path], str]:
    """Chats with an engine: a reply ends by itself and shows no marker; what is resumed is not read again."""

    def chats(model: Path, folder: Path) -> str:
        session = (*engine, "--session", f"real-{time.time_ns()}")
        first = _turn(model, *session, "-p", "My name is Ada. Say hello to me in one short sentence.")
        again = _turn(model, *session, "-p", "What is my name?")
        assert first["finish"] == again["finish"] == "stop", (first, again)
        assert "<|" not in first["text"] + again["text"], (first, again)
        assert again["seen_tokens"] > first["seen_tokens"] > again["prompt_tokens"], (first, again)
        return f"{first['text']!r}, resumed: {again['text']!r}"

    return chats


def _turn(model: Path, *arguments: str) -> dict[str, Any]:
    lines = _run("h2o-chat", model, "-q", "--temp", "0", "-n", "80", "--jsonl", "-", *arguments).splitlines()
    return next(record for record in map(json.loads, lines) if record["type"] == "turn")


def schema(model: Path, folder: Path) -> str:
    """A reply that follows a JSON schema, by the server."""
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    wanted = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    request = {
        "messages": [{"role": "user", "content": "Ada is 36 years old. Give her name and age as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": wanted}},
        "temperature": 0,
        "max_tokens": 100,
    }
    server = Running(folder, ModelConfig(str(model)), CacheConfig())
    try:
        status, answer = post(server.url, "/v1/chat/completions", request)
    finally:
        server.close()
    assert status == 200, answer
    person = json.loads(answer["choices"][0]["message"]["content"])
    assert person == {"name": "Ada", "age": 36}, person
    return str(person)


def tools(model: Path, folder: Path) -> str:
    """Ten requests with two tools: by `auto`, by `required` and by name."""
    server = Running(folder, ModelConfig(str(model)), CacheConfig())
    try:
        assert not real_model.check(server, len(real_model.REQUESTS))
    finally:
        server.close()
    return "all calls arrive"


def comparisons(model: Path, folder: Path) -> str:
    """Runs nll and speed."""
    text, common = _text(folder), ("--policies", "full,h2o", "--windows", "256")
    _run("h2o-compare", model, *common, "--text", str(text), "--tokens", "1024", first="nll")
    _run("h2o-compare", model, *common, "--text", str(text), "--histories", "256", "--peers", "", first="speed")
    return "nll, speed"


def recall(model: Path, folder: Path) -> str:
    """Runs recall with a few facts: each of them is asked for several times."""
    options = ("--policies", "h2o", "--text", str(_text(folder)), "--distances", "64", "--facts", "4")
    _run("h2o-compare", model, *options, first="recall")
    return "recall"


def _text(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text(python_manual()[:16000])
    return text


def _run(command: str, model: Path, *arguments: str, first: str = "") -> str:
    """Output of a command, which must succeed."""
    program = str(Path(sys.executable).with_name(command))
    done = subprocess.run(
        [program, *([first] if first else []), "-m", str(model), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


CHECKS: dict[str, Callable[[Path, Path], str]] = {
    "logits": logits,
    "chat": chat(),
    "chat, eager": chat("--engine", "eager"),
    "schema": schema,
    "tools": tools,
    "compare": comparisons,
    "recall": recall,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--checks", default=";".join(CHECKS), help="separated by semicolons")
    asked = parser.parse_args(arguments)
    failed = 0
    for name in asked.checks.split(";"):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = CHECKS[name](asked.model.resolve(), Path(folder))
            except AssertionError as error:
                failed, result = failed + 1, f"FAILED: {error}"
        print(f"{name:16}{time.monotonic() - began:6.1f} s  {result}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
