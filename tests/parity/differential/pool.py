"""Pools of ranks that live on from case to case: torch is imported, and the process group is made, once."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[3]
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "SLURM_", "FIT_", "PYTEST_", "OMPI_", "PMI", "PET_")


class Failed(Exception):
    """A rank raised, died or did not answer: what there is to say about it."""

    alike = False
    """All ranks raised the same error: they go on."""


class Pool:
    """The ranks of one job."""

    def __init__(self, world: int, root: Path = ROOT) -> None:
        self.world = world
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.processes: list[subprocess.Popen[str]] = []
        self.answers: list[int] = []
        self.rest: dict[int, bytes] = {}
        self.errors = [tempfile.TemporaryFile("w+") for _ in range(world)]  # noqa: SIM115  (closed by close)
        for rank in range(world):
            read, write = os.pipe()
            variables = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
            variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
            if world > 1:
                variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            command = [sys.executable, "-m", "tests.parity.differential.worker", str(write)]
            self.processes.append(
                subprocess.Popen(
                    command, cwd=root, env=variables, stdin=subprocess.PIPE, stderr=self.errors[rank], pass_fds=[write], text=True
                )
            )
            os.close(write)
            self.answers.append(read)
            self.rest[read] = b""
        self._read(120)

    def run(self, job: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """What each rank answers.

        Raises:
            Failed: some rank did not end well; the pool is of no more use.
        """
        line = json.dumps(job) + "\n"
        try:
            for process in self.processes:
                assert process.stdin is not None
                process.stdin.write(line)
                process.stdin.flush()
        except BrokenPipeError:
            raise Failed(f"a rank has died\n{self._written()}") from None
        return [answer["found"] for answer in self._read(timeout)]

    def _read(self, timeout: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        found: dict[int, dict[str, Any]] = {}
        while len(found) < self.world:
            missing = [fd for fd in self.answers if fd not in found]
            ready, _, _ = select.select(missing, [], [], max(0.0, deadline - time.monotonic()))
            if not ready and any("error" in answer for answer in found.values()):
                break
            if not ready:
                ranks = [self.answers.index(fd) for fd in missing]
                for process in self.processes:
                    process.send_signal(signal.SIGUSR1)
                time.sleep(1.0)  # to write where they stand
                raise Failed(f"hangs: no answer of rank(s) {ranks} after {timeout:g} s\n{self._written()}")
            for fd in ready:
                piece = os.read(fd, 1 << 20)
                self.rest[fd] += piece
                if not piece:
                    raise Failed(f"rank {self.answers.index(fd)} has died\n{self._written()}")
                if self.rest[fd].endswith(b"\n"):
                    found[fd], self.rest[fd] = json.loads(self.rest[fd]), b""
                    if "error" in found[fd]:
                        deadline = min(deadline, time.monotonic() + 5)  # the others may wait for this rank
        errors = [(self.answers.index(fd), answer["error"]) for fd, answer in found.items() if "error" in answer]
        if errors:
            rank, text = min(errors)
            failed = Failed(f"rank {rank}: {text[-3000:]}")
            failed.alike = len(errors) == self.world and len({text.splitlines()[-1] for _, text in errors}) == 1
            raise failed
        return [found[fd] for fd in self.answers]

    def _written(self) -> str:
        texts = []
        for rank, file in enumerate(self.errors):
            file.flush()
            file.seek(0)
            texts.append(f"--- rank {rank}: {file.read()[-1500:]}")
        return "\n".join(texts)

    def close(self) -> None:
        """End the ranks."""
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for fd in self.answers:
            os.close(fd)
        for file in self.errors:
            file.close()


class Pools:
    """One pool for each world size, started when it is first needed and again after a failure."""

    def __init__(self, root: Path = ROOT, timeout: float = 60.0) -> None:
        self.root, self.timeout = root, timeout
        self.pools: dict[int, Pool] = {}
        self.warm: set[tuple[int, str]] = set()
        """What each pool has run before: the first time imports much."""

    def run(self, world: int, job: dict[str, Any]) -> list[dict[str, Any]]:
        """As :meth:`Pool.run`."""
        if world not in self.pools:
            self.pools[world] = Pool(world, self.root)
            self.warm = {pair for pair in self.warm if pair[0] != world}
        names = str(job["case"]["strategy"]) + str(job["case"]["then"])
        kind = (world, "deepspeed" if "deepspeed" in names else "")
        try:
            answers = self.pools[world].run(job, self.timeout + (0 if kind in self.warm else 300))
            self.warm.add(kind)
            return answers
        except Failed as error:
            if not error.alike:
                self.pools.pop(world).close()
            raise

    def close(self) -> None:
        while self.pools:
            self.pools.popitem()[1].close()

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
