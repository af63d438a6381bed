"""No untrusted code, no unnecessary network access, and readers that survive any bytes."""

import ast
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

import h2o_lab
import h2o_stream
from h2o_stream.config import ModelConfig
from h2o_stream.loading.transformers_model import load
from h2o_stream.models import template_limits
from h2o_stream.models.rendering import render
from h2o_stream.ui.command_list import COMMANDS, is_command
from tests.commands import invoke
from tests.in_turn import in_turn
from tests.preloaded import run
from tests.terminal import BIN

SOURCES = sorted(path for each in (h2o_stream, h2o_lab) for path in Path(str(each.__file__)).parent.rglob("*.py"))


@in_turn("source", SOURCES)
def test_nothing_runs_what_a_file_says(source: Path) -> None:
    unsafe, text = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}, source.read_text(encoding="utf-8")
    suspects = (*unsafe, "eval", "exec", "os.system", "torch.load", "trust_remote_code", "shell")
    if not any(word in text for word in suspects):
        return  # parsing them all takes two seconds
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            assert not unsafe & {name.split(".")[0] for name in names}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "os.system", "torch.load"), f"{source}:{node.lineno}"
            for keyword in node.keywords:
                assert keyword.arg not in ("trust_remote_code", "shell"), f"{source}:{node.lineno}"


CUT_OFF = """import socket
def refuse(*arguments, **more):
    open({tried!r}, 'a').write(repr(arguments))
    raise OSError('the network is cut off')
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
"""
"""Block all network access and record attempts."""


@pytest.mark.parametrize("offline", [False, True], ids=["local model", "offline"])
def test_no_network_without_need(offline: bool, tmp_path: Path) -> None:
    """Nor in the imports of a new interpreter, which are the same offline."""
    tried = tmp_path / "tried"
    cut_off, arguments = CUT_OFF.format(tried=str(tried)), ["h2o-chat", "-p", "Say hi.", "-n", "4", "-q"]
    if offline:
        arguments.append("--offline")
        code = f"import sys\nfrom h2o_stream.cli.chat import main\nsys.argv = {arguments}\nmain()\n"
        done = run("-c", cut_off + code)
    else:
        (tmp_path / "sitecustomize.py").write_text(cut_off)
        arguments[0] = str(BIN / "h2o-chat")
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not tried.exists(), tried.read_text()


@pytest.fixture
def loaded_folder(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tiny_folder`, loaded once for all commands of a test."""
    model = load(ModelConfig(str(tiny_folder)))
    monkeypatch.setattr("h2o_stream.ui.start.load_model", lambda *_: model)
    return tiny_folder


class TestFuzzing:
    """What is typed; test_hostile_models.py has the files."""

    @settings(
        max_examples=10, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(
        commands=st.lists(
            st.builds(
                lambda name, rest: f"/{name} {rest}",
                st.sampled_from([name for name in COMMANDS if name not in ("edit",)]) | st.text("abcdefgh", max_size=6),
                st.text(st.characters(exclude_characters="\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=12),
            ),
            max_size=5,
        )
    )
    def test_commands(self, commands: list[str], loaded_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        monkeypatch.chdir(tmp_path)
        typed = "\n".join(command for command in commands if is_command(command.strip()))
        done = invoke("h2o-chat", "-m", loaded_folder, "-n", "1", "-q", typed=typed.encode("utf-8", "surrogatepass"))  # type: ignore[arg-type]
        assert done.exit_code == 0, (typed, done.stderr)
        assert "unexpected" not in done.stderr, (typed, done.stderr)


def again(first: str, then: str, last: str = "{{ n.x }}") -> str:
    """A template that makes something of what it has made before, 60 times."""
    begin = "{% set n = namespace(x=" + first + ") %}{% for i in range(60) %}{% set n.x = "
    return begin + then + " %}{% endfor %}" + last


TEMPLATES = {
    "a range": "{% for i in range(10**9) %}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops with text": "{% for i in range(99999) %}{% for j in range(99999) %}"
    + "abc" * 99
    + "{% endfor %}{% endfor %}",
    "calls of itself": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless calls": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a search in a loop": "{% set s = 'a' * 10**7 %}{% for i in range(99999) %}{{ 'b' in s }}{% endfor %}",
    "a product": "{{ 'a' * 10**10 }}",
    "a list": "{{ [0] * 10**10 }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a width": "{{ 'a'.ljust(10**10) }}",
    "a filter's width": "{{ 'a' | center(10**10) }}",
    "a format": "{{ '%1000000000d' % 1 }}",
    "another format": "{{ '{:>{}}'.format(1, 10**10) }}",
    "doubling": again("'ab'", "n.x ~ n.x"),
    "sums": again("'ab'", "n.x + n.x"),
    "replacing": again("'a'", "n.x.replace('a', 'aa')"),
    "lists of lists": again("[1]", "[n.x, n.x]"),
    "their JSON": again("[1]", "[n.x, n.x]", "{{ n.x | tojson }}"),
    "no number": "{{ 1 // 0 }}",
    "nesting": "{% for i in [1] %}" * 60 + "{% endfor %}" * 60,
    "brackets": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "length": " " * 2**21,
}


@in_turn("name", TEMPLATES)
def test_chat_templates_that_never_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused in one line before they take much time or memory."""
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.02)
    begun = time.thread_time()
    with pytest.raises(TemplateError) as refused:
        render(TEMPLATES[name], [{"role": "user", "content": "Hi"}])
    assert "\n" not in str(refused.value)
    assert time.thread_time() - begun < 0.5


def test_long_conversations_are_within_the_limits() -> None:
    template = (
        "{% for m in messages %}{% if loop.first %}<s>{% endif %}[{{ m.role | upper }}] "
        "{{ m.content.replace('\r\n', '\n') | trim ~ (loop.index * 1000 + 1700000000) }}{% endfor %}"
    )
    for messages, size in ((1, 4_000_000), (20_000, 100)):
        text = render(template, [{"role": "user", "content": "x" * size}] * messages)
        assert len(text) > messages * size
