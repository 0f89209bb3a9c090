"""Pools of ranks that live on from case to case: torch is imported, and the process group is made, once."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.forkserver import Forked, ForkServer
from support.ranks import clean_environment, forkserver, rank_variables

ROOT = Path(__file__).resolve().parents[3]
RANK = "import sys\nfrom tests.parity.differential.worker import rank\nif __name__ == '__main__':\n    rank(*sys.argv[1:])\n"
START = 900.0
"""Seconds for a process to import torch and the library, on a machine that does much else."""
LIFE = 100
"""Runs after which ranks are replaced, so that nothing piles up in them: new ones cost milliseconds."""


class Failed(Exception):
    """A rank raised, died or did not answer: what there is to say about it."""

    alike = False
    """All ranks raised the same error: they continue."""


class Pool:
    """The ranks of one job, which train with the library of the tree ``root``."""

    def __init__(self, world: int, forks: ForkServer, root: Path) -> None:
        self.world, self.ran = world, 0
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.place = tempfile.TemporaryDirectory(prefix="ranks-")
        self.errors = [Path(self.place.name) / f"{rank}.err" for rank in range(world)]
        self.ranks: dict[int, socket.socket] = {}
        self.pids: dict[int, int] = {}
        self.rest: dict[int, bytes] = dict.fromkeys(range(world), b"")
        address = str(Path(self.place.name) / "socket")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(world)
            server.settimeout(START)
            script = Path(self.place.name) / "rank.py"
            script.write_text(RANK)
            self.forked: list[Forked] = []
            for rank in range(world):
                variables = clean_environment(PYTHONPATH=str(root))
                if world > 1:
                    variables |= {
                        "TORCHELASTIC_USE_AGENT_STORE": "True",
                        **rank_variables(rank, world, self.store.port),
                    }
                out = Path(self.place.name) / f"{rank}.out"
                self.forked.append(forks.fork([str(script), address, str(rank)], variables, out, self.errors[rank]))
            for _ in range(world):
                connection = server.accept()[0]
                hello = json.loads(connection.makefile().readline())
                self.ranks[hello["rank"]], self.pids[hello["rank"]] = connection, hello["pid"]

    def run(self, job: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """What each rank answers.

        Raises:
            Failed: some rank did not end well.
        """
        for connection in self.ranks.values():
            with suppress(BrokenPipeError):
                connection.sendall(json.dumps(job).encode() + b"\n")
        answers = self._read(timeout)
        errors = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if errors:
            failed = Failed(f"rank {min(errors)}: {errors[min(errors)][-3000:]}")
            failed.alike = len(errors) == self.world and len({text.splitlines()[-1] for text in errors.values()}) == 1
            raise failed
        return [answers[rank]["found"] for rank in range(self.world)]

    def _read(self, timeout: float) -> dict[int, dict[str, Any]]:
        """The answers; of some ranks only, when others raised and these wait for them."""
        deadline = time.monotonic() + timeout
        found: dict[int, dict[str, Any]] = {}
        while len(found) < self.world:
            missing = {self.ranks[rank]: rank for rank in self.ranks if rank not in found}
            ready, _, _ = select.select(list(missing), [], [], max(0.0, deadline - time.monotonic()))
            if not ready and any("error" in answer for answer in found.values()):
                break
            if not ready:
                for pid in self.pids.values():
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(2.0)  # for them to write where they stand
                raise Failed(
                    f"hangs: no answer of rank(s) {sorted(missing.values())} after {timeout:g} s\n{self._written()}"
                )
            for connection in ready:
                rank, piece = missing[connection], connection.recv(1 << 20)
                self.rest[rank] += piece
                if not piece:
                    raise Failed(f"rank {rank} has died\n{self._written()}")
                if self.rest[rank].endswith(b"\n"):
                    found[rank], self.rest[rank] = json.loads(self.rest[rank]), b""
                    if "error" in found[rank]:
                        deadline = min(deadline, time.monotonic() + 10)
        return found

    def _written(self) -> str:
        return "\n".join(
            f"--- rank {rank}: {path.read_text(errors='replace')[-2500:]}" for rank, path in enumerate(self.errors)
        )

    def close(self) -> None:
        """End the ranks."""
        for process in self.forked:
            process.kill()
        for connection in self.ranks.values():
            connection.close()
        self.place.cleanup()


class Pools:
    """One pool for each world size, started when it is first needed and again after a failure.

    Args:
        root: the tree whose library trains.
        timeout: seconds after which a run hangs.
    """

    def __init__(self, root: Path = ROOT, timeout: float = 60.0) -> None:
        self.root, self.timeout = root, timeout
        self.server: ForkServer | None = None
        self.pools: dict[int, Pool] = {}
        self.warm: set[tuple[int, str]] = set()
        """What each pool has run before: the first time imports and builds much."""

    def run(self, world: int, job: dict[str, Any]) -> list[dict[str, Any]]:
        """As :meth:`Pool.run`."""
        if world not in self.pools:
            if self.server is None:
                self.server = (
                    forkserver() if self.root == ROOT else ForkServer(clean_environment(PYTHONPATH=str(self.root)))
                )
            self.pools[world] = Pool(world, self.server, self.root)
            self.warm = {pair for pair in self.warm if pair[0] != world}
        names = job["case"]["strategy"] + job["case"]["then"]
        kind = (world, "deepspeed" if "deepspeed" in names else "")
        try:
            answers = self.pools[world].run(job, self.timeout if kind in self.warm else max(self.timeout, START / 3))
        except Failed as error:
            if not error.alike:
                self.pools.pop(world).close()
            raise
        self.warm.add(kind)
        self.pools[world].ran += 1
        if self.pools[world].ran >= LIFE:
            self.pools.pop(world).close()
        return answers

    def close(self) -> None:
        while self.pools:
            self.pools.popitem()[1].close()
        if self.server is not None and self.root != ROOT:
            self.server.close()
        self.server = None

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
