"""Notes between ranks when collectives are no longer possible, because some ranks hang or are lost."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from engine.distributed.group import Group

ANSWER_S = 3.0
"""How long a live store may take to answer (s)."""


class Board:
    """JSON values by name in the job's store, over a separate connection: other threads may be blocked on the others.

    A store that does not answer is not an error here: then nothing is found, and :attr:`answers` is False.
    """

    def __init__(self, group: Group, topic: str) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.answers = True
        store: Any = group.store
        self._store = dist.PrefixStore(f"board/{topic}", store.clone()) if store is not None else None

    def put(self, name: str, value: Any) -> None:
        """Leave a note; one of the same name is replaced."""
        store = self._store
        if store is None or not self.answers:
            return

        def write() -> bool:
            store.set(name, json.dumps(value))
            return store.check([name])  # a set has no answer: over a broken connection it would seem to succeed

        self._within(ANSWER_S, write)

    def get(self, name: str, wait_s: float) -> Any:
        """The note of this name, after at most ``wait_s``; ``None``: there is none."""
        store = self._store
        if store is None or not self.answers:
            return None

        def read() -> Any:
            deadline = time.monotonic() + wait_s
            while not store.check([name]):  # store.wait would print warnings
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.05)
            return json.loads(store.get(name))

        return self._within(wait_s + ANSWER_S, read)

    def _within(self, seconds: float, call: Callable[[], Any]) -> Any:
        """The result of ``call``; ``None`` when it fails or takes longer: a broken connection blocks for minutes."""
        found: list[Any] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError, ValueError):  # the store's errors are RuntimeErrors
                found.append(call())

        thread = threading.Thread(target=run, name="fit-board", daemon=True)
        thread.start()
        thread.join(seconds)
        self.answers = bool(found)
        return found[0] if found else None
