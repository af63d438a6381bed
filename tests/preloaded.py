"""Starts commands without their import time: a process that has imported everything forks for each request.

Importing torch and transformers takes seconds. The server does it once; each command is a fork of it with the requested
file descriptors, environment and working directory, and in its own process session if it has a terminal. It runs the
command's entry point and shuts the interpreter down, so signals, exit codes and closed pipes behave as usual.
"""

import atexit
import fcntl
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

_ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}  # fmt: skip
"""The server's environment: as before any test changes it, with the variables that commands set before imports, and
without threads, which no fork would have.
"""

_IMPORTS = (
    "h2o_stream.cli.chat", "h2o_stream.cli.compare", "h2o_stream.cli.stream", "h2o_stream.ui.chat",
    "h2o_stream.ui.loading_chat", "h2o_stream.ui.stream", "h2o_stream.native.tensor_stepper",
    "h2o_stream.cache.policies.accumulated", "rich.markdown", "prompt_toolkit.input.vt100", "typer._adapters",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)  # fmt: skip


class Preloaded(subprocess.Popen[Any]):
    """`subprocess.Popen` of a command, ``["h2o-chat", ...]``, or of Python code, ``["-c", code, ...]``.

    Args:
        arguments: the command and its arguments.
        terminal: make standard input the controlling terminal of the process.
        closed: standard streams to close.
        more: arguments of `subprocess.Popen`: streams, ``cwd``, ``env``, ``text``, ``encoding``.
    """

    def __init__(
        self, arguments: Sequence[Any], terminal: bool = False, closed: Sequence[int] = (), **more: Any
    ) -> None:
        self._terminal, self._closed = terminal, closed
        super().__init__([os.fspath(argument) for argument in arguments], **more)

    def _execute_child(self, *args: Any) -> None:
        arguments, cwd, env, pipes = args[0], args[5], args[6], args[10:16]
        streams = [pipes[0], pipes[3], pipes[5]]
        reply, theirs = socket.socketpair()
        with theirs:
            descriptors = [default if stream == -1 else stream for default, stream in enumerate(streams)]
            socket.send_fds(server(), [b"."], [*descriptors, theirs.fileno()])
        request = {
            "arguments": arguments, "cwd": os.fspath(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env), "terminal": self._terminal, "closed": list(self._closed),
        }  # fmt: skip
        reply.sendall(json.dumps(request).encode() + b"\n")
        self._reply = reply.makefile("rb")
        self._socket = reply
        self.pid = int(self._reply.readline())
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self._socket], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = os.waitstatus_to_exitcode(int(self._reply.readline()))
            self._reply.close()
            self._socket.close()
        return self.returncode

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def __enter__(self) -> Self:
        return self


def run(
    *arguments: Any, input: str | None = None, timeout: float = 120, closed: Sequence[int] = (), **more: Any
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` with captured output; without `input`, standard input is empty."""
    streams = {"stdin": subprocess.DEVNULL if input is None else subprocess.PIPE, "stderr": subprocess.PIPE}
    with Preloaded(
        arguments, stdout=subprocess.PIPE, text=True, encoding="utf-8", closed=closed, **streams, **more
    ) as child:
        try:
            out, errors = child.communicate(input, timeout)
        except BaseException:
            child.kill()
            raise
    return subprocess.CompletedProcess(arguments, child.returncode, out, errors)


@cache
def server() -> socket.socket:
    """A connection to the process that forks, which starts with the first call and exits when all have closed it."""
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())], cwd=Path(__file__).parents[1],
            env=_ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            start_new_session=True,
        )  # fmt: skip
    return ours


def _serve(control: socket.socket) -> list[str]:
    """Fork a child per request until the tests end. Returns only in the children, with their arguments."""
    replies: dict[int, socket.socket] = {}
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready, _, _ = select.select([ended, control], [], [])
        if ended in ready:
            os.read(ended, 4096)
            while replies and (done := os.waitpid(-1, os.WNOHANG))[0]:
                with suppress(OSError), replies.pop(done[0]) as reply:
                    reply.sendall(b"%d\n" % done[1])
        if control not in ready:
            continue
        _, descriptors, _, _ = socket.recv_fds(control, 1, 4)
        if not descriptors:
            sys.exit()
        reply = socket.socket(fileno=descriptors.pop())
        request = json.loads(reply.makefile("rb").readline())
        if not (child := os.fork()):
            for unneeded in (control, reply, *replies.values()):
                unneeded.close()
            return _become(request, descriptors)
        replies[child] = reply
        reply.sendall(b"%d\n" % child)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Take over the descriptors, terminal, folder and environment of the request."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
    if request["terminal"]:
        os.setsid()
        fcntl.ioctl(descriptors[0], termios.TIOCSCTTY, 0)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if number in request["closed"]:
            os.close(number)
            stream = None
        else:
            before: Any = getattr(sys, f"__{name}__")
            mode, buffering = "w" if number else "r", 1 if number == 2 or os.isatty(number) else -1
            stream = open(number, mode, buffering, before.encoding, before.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    return list(request["arguments"])


def _warm_up() -> None:
    """Import what commands import, and load a model and a tokenizer to fill the caches."""
    for name in _IMPORTS:
        import_module(name)
    import typer.main
    from tqdm import tqdm
    from transformers import LlamaConfig, LlamaForCausalLM

    from h2o_stream.config import ModelConfig
    from h2o_stream.loading.transformers_model import load, load_tokenizer
    from h2o_stream.models.tokenizer import FileTokenizer
    from h2o_stream.recall.terms import TermWeights
    from tests.kept_tokenizers import keep_tokenizers

    keep_tokenizers()
    typer.main.get_command = cache(typer.main.get_command)  # reading the signatures takes up to 40 ms
    for command in ("chat", "compare", "stream"):
        typer.main.get_command(sys.modules[f"h2o_stream.cli.{command}"].app)
    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0  # progress bars would start a thread
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    with TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(folder)
        load_tokenizer(ModelConfig()).save_pretrained(folder)
        load(ModelConfig(folder))
        TermWeights(FileTokenizer.from_folder(Path(folder))).weight("word")
    tqdm.monitor_interval = interval


def _main(control: socket.socket) -> None:
    gc.disable()
    _warm_up()
    deadline = time.monotonic() + 10
    while _threads() > 1:  # a fork has only one thread; the loading threads are about to exit
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
    commands = entry_points(group="console_scripts")
    gc.collect()
    gc.freeze()
    gc.enable()
    command, *arguments = _serve(control)
    sys.modules["__main__"].__package__ = None  # behave like a script, not like ``python -m tests.preloaded``
    try:
        if command == "-c":
            sys.argv = ["-c", *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [command, *arguments]
            commands[command].load()()
        code: Any = 0
    except SystemExit as left:
        code = left.code or 0
    if isinstance(code, int):
        leave(code)
    sys.exit(code)


def _threads() -> int:
    tasks = Path("/proc/self/task")  # on Linux, includes threads that Python did not start
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def leave(code: int) -> None:
    """Exit as the interpreter does, but without touching the memory shared with the parent.

    Returns if a stream cannot be flushed, so that the interpreter handles the error in its own way.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
