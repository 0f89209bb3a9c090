"""One start of a job: its launcher, its ranks as they report, and those that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .kills import Kill
from .recipes import Recipe
from .setups import Setup

LINGER = 2.0
"""Seconds that ranks may live on when their launcher was killed."""
PATIENCE = 100.0
"""Seconds that an attempt may take, and that processes may take to end when others are killed."""


def marked(text: str) -> list[int]:
    """The living processes that have this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return [pid for pid in found if pid != os.getpid()]


class Start:
    """Runs it to its end, which may be a kill. Afterwards its fields say how it went.

    Args:
        plan: whom to kill in the first attempt, in the one that the launcher starts after it, and so on.
        typical: seconds to the first step.
        report: called with a line for each kill.
    """

    def __init__(
        self,
        setup: Setup,
        recipe: Recipe,
        tree: Path,
        place: Path,
        number: int,
        plan: Sequence[Kill],
        typical: float,
        report: Callable[[str], None],
    ) -> None:
        self.setup, self.recipe, self.place, self.plan = setup, recipe, place, plan
        self.typical, self.report = typical, report
        self.killed: list[tuple[str, str]] = []
        """The phase and the victim of each kill."""
        self.orphans = 0
        self.attempts = 1
        self.hangs = False
        self.seconds: float | None = None
        """To the first step of the first attempt."""
        self.counts: dict[int, dict[str, int]] = {}
        """Events of each phase, by rank: of those that ended well."""
        self._ranks: dict[tuple[int, int], int] = {}  # (attempt, rank): process
        self._due: list[tuple[float, Kill, socket.socket | None]] = []
        self._pending: list[Kill] = []
        self._training: set[int] = set()
        self._freed = float("inf")  # when the launcher was killed
        self._chance = random.Random(place.name)
        self._address = f"campaign-{uuid.uuid4().hex}"
        self._diaries = place / "diaries" / str(number)
        self._diaries.mkdir(parents=True)
        self.output = place / f"start{number}.txt"
        self._environment = setup.environment(tree, place, self._address)
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Its launcher's exit status."""
        with socket.socket(socket.AF_UNIX) as server, self.output.open("w") as output:
            server.bind("\0" + self._address)
            server.listen()
            self._selector.register(server, selectors.EVENT_READ)
            self._begun = time.monotonic()
            command = self.setup.command(self.recipe, self.place, self._diaries, max(0, len(self.plan) - 1))
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                cwd=self.place,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self._arm(0)
            over = False
            try:
                self._until(lambda: self._process.poll() is not None, server)
                self.hangs = self._process.poll() is None
                if not self.hangs:
                    self._settle(server)
                    over = True
            finally:
                if not over:
                    self._end_all()
                self._process.wait()
                for key in list(self._selector.get_map().values()):
                    if key.fileobj is not server:
                        key.fileobj.close()  # type: ignore[union-attr]
                self._selector.close()
        return self._process.returncode

    def _settle(self, server: socket.socket) -> None:
        """Wait for what the launcher has left behind; workers of loaders may live on for some seconds, beside the next start."""
        if not self.setup.waits:
            return
        if not self.setup.binds:
            self._end_all()  # as a scheduler does with what is left of a job
        self._until(lambda: not marked(self._address), server)
        self.orphans += len(marked(self._address))
        self._end_all()

    def _until(self, condition: Callable[[], bool], server: socket.socket) -> None:
        deadline = time.monotonic() + PATIENCE * (1 + len(self.plan))
        while not condition() and time.monotonic() < deadline:
            now = time.monotonic()
            wait = min([0.02, *(moment - now for moment, *_ in self._due)])
            for key, _ in self._selector.select(max(0.0, wait)):
                if key.fileobj is server:
                    connection = server.accept()[0]
                    self._selector.register(connection, selectors.EVENT_READ, bytearray())
                else:
                    self._hear(key.fileobj, key.data)
            for entry in [each for each in self._due if each[0] <= time.monotonic()]:
                self._due.remove(entry)
                self._fire(*entry[1:])

    def _hear(self, connection: Any, rest: bytearray) -> None:
        """Take in what a rank says."""
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            piece = b""
        if not piece:
            self._selector.unregister(connection)
            connection.close()
        rest += piece
        *lines, last = bytes(rest).split(b"\n")
        rest[:] = last
        for line in lines:
            self._take(connection, json.loads(line))

    def _take(self, connection: socket.socket, message: dict[str, Any]) -> None:
        if "hello" in message:
            self._meet(connection, message)
        elif "begun" in message:
            self._training.add(message["attempt"])
            self.seconds = self.seconds or time.monotonic() - self._begun
        elif "kill" in message:
            kill = self.plan[message["attempt"]]
            self.report(f"{kill}: {message['kill']}")
            if kill.error:
                self.killed.append((kill.phase, kill.victim))
                return
            time.sleep(kill.delay)
            self._fire(kill, None if kill.delay else connection)
        elif "counts" in message:
            self.counts[message["rank"]] = message["counts"]
            if self.setup.binds and time.monotonic() > self._freed + LINGER:
                self.orphans += 1

    def _meet(self, connection: socket.socket, message: dict[str, Any]) -> None:
        attempt, rank = message["attempt"], message["rank"]
        self._ranks[attempt, rank] = message["pid"]
        if attempt + 1 > self.attempts:
            self.attempts = attempt + 1
            self._arm(attempt)
        kill = self.plan[attempt] if attempt < len(self.plan) else None
        _answer(connection, kill.asked() if kill and kill.watcher == rank else {})
        for kill in [each for each in self._pending if each.victim == f"rank {rank}"]:
            self._pending.remove(kill)
            self._fire(kill, None)

    def _arm(self, attempt: int) -> None:
        """Set the alarm of a kill by the clock."""
        if attempt < len(self.plan) and not self.plan[attempt].number:
            self._due.append((time.monotonic() + self.plan[attempt].share * self.typical, self.plan[attempt], None))

    def _fire(self, kill: Kill, waiting: socket.socket | None) -> None:
        if kill.victim == "all":
            victims = marked(self._address)
            self._chance.shuffle(victims)
        elif kill.victim == "launcher":
            victims, self._freed = [self._process.pid], time.monotonic()
        else:
            pid = self._ranks.get((self.attempts - 1, int(kill.victim[-1])))
            if pid is None:  # killed as soon as it is there
                self._pending.append(kill)
            victims = [] if pid is None else [pid]
        if not kill.number:
            self.report(f"{kill}: after {time.monotonic() - self._begun:.2f} s")
        done = [pid for pid in victims if _kill(pid)]
        if done:
            late = not kill.number and self.attempts - 1 in self._training
            self.killed.append(("steps" if late else kill.phase, kill.victim))
        if waiting is not None:
            _answer(waiting, {})

    def _end_all(self) -> None:
        for pid in marked(self._address):
            _kill(pid)


def _answer(connection: socket.socket, what: dict[str, Any]) -> None:
    """Let a rank continue, if it is alive."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(what).encode() + b"\n")


def _kill(pid: int) -> bool:
    """Whether it was alive."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return state != "Z"
