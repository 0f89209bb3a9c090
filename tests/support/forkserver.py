"""A process that has imported torch and the library, and forks itself into the ranks that tests ask for: one starts in milliseconds.

Beside that a rank is what ``python script.py`` is: its own environment, arguments, output and ``__main__``, and the interpreter's usual end.
Variables that are read as Python starts or as torch is imported (``OMP_NUM_THREADS``, ``PYTHONWARNINGS``) are those of the tests.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

IMPORTED = (
    *(
        "torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint",
    ),
    *(
        "torchmetrics",
        "engine.fit",
        "engine.engine",
        "engine.strategies.fsdp",
    ),
    *("engine.strategies.ddp", "engine.strategies.mesh_parallel", "callbacks", "pytest"),
)


class Forked:
    """A process of the fork server, with what is used of ``subprocess.Popen``."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self._server, self._number = server, number

    @property
    def returncode(self) -> int | None:
        return self._server.codes.get(self._number)

    def poll(self) -> int | None:
        """Its exit status (-n: signal n) once it has ended."""
        if self.returncode is None:
            self._server.collect(0.0)
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            self._server.collect(1.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            self._server.send({"kill": self._number})


class ForkServer:
    """The process, as the tests see it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, str(Path(__file__)), *IMPORTED]
        self.process = subprocess.Popen(command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.codes: dict[int, int] = {}
        self._count, self._rest = 0, b""
        atexit.register(self.process.kill)

    def fork(self, command: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> Forked:
        """Start ``python *command``."""
        self._count += 1
        files = [str(out), str(err)]
        self.send(
            {
                "number": self._count,
                "command": list(command),
                "environment": dict(environment),
                "directory": os.getcwd(),
                "files": files,
            }
        )
        return Forked(self, self._count)

    def close(self) -> None:
        """End the process. Ranks that run on are left to whoever has asked for them."""
        atexit.unregister(self.process.kill)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def send(self, request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def collect(self, seconds: float) -> None:
        """Take in who has ended, waiting so long for it at most."""
        assert self.process.stdout is not None
        file = self.process.stdout.fileno()
        while select.select([file], [], [], seconds)[0]:
            piece = os.read(file, 65536)
            if not piece:
                raise RuntimeError(f"the fork server has ended with {self.process.wait()}")
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                number, code = json.loads(line)
                self.codes[number] = code
            seconds = 0.0


def _serve() -> dict[str, Any] | None:
    """Fork what lines on stdin ask for, and tell who has ended. Returns in a forked process, with what it is to be."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    numbers: dict[int, int] = {}
    rest = b""
    while True:
        if awake in select.select([0, awake], [], [])[0]:
            os.read(awake, 4096)
            while numbers and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                os.write(1, json.dumps([numbers.pop(ended[0]), os.waitstatus_to_exitcode(ended[1])]).encode() + b"\n")
            continue
        piece = os.read(0, 1 << 20)
        if not piece:
            return None
        *lines, rest = (rest + piece).split(b"\n")
        for request in map(json.loads, lines):
            if "kill" in request:
                for pid in [pid for pid, number in numbers.items() if number == request["kill"]]:
                    os.kill(pid, signal.SIGKILL)
                continue
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(awake)
                os.close(wake)
                return dict(request)
            numbers[pid] = request["number"]


def _run_as(request: dict[str, Any]) -> types.ModuleType:
    """Take over the environment, the arguments and the files; the module that the script is to be."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    for number, path in enumerate((os.devnull, *request["files"])):
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    sys.argv, sys.orig_argv = request["command"], [sys.executable, *request["command"]]
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path]
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *places]
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = sys.argv[0]
    return module


if __name__ == "__main__":
    gc.disable()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # what was imported is not walked at each process's end: that takes a second
    gc.enable()
    asked = _serve()
    if asked is not None:
        main = _run_as(asked)
        exec(compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec"), main.__dict__)
