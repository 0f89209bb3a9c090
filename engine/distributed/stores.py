"""The job's store: how one is served for this machine only, and notes between ranks that can no longer use collectives."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from engine.distributed import addresses
from engine.distributed.group import Group
from engine.utils.helper_threads import log_failure

ANSWER_S = 3.0
"""The time (s) within which a working store answers."""


def serve(host: str, port: int, *, timeout: timedelta, world_size: int | None = None) -> dist.TCPStore:
    """Serve a store for processes on this machine. At a loopback address (or ``localhost``) it listens only there, else on all interfaces.

    torch's store has no authentication: anyone who reaches the port may read and write. This is not for several machines: the first one may have
    the address ``localhost`` while the others use its name.

    Args:
        port: the port; 0 for any free one, whose number is the store's ``.port``.

    Raises:
        torch.distributed.DistError: the port is taken.
    """
    listener = _listener(host, port)
    try:
        store = dist.TCPStore(
            host,
            listener.getsockname()[1] if listener else port,
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.fileno() if listener else None,
        )
    except BaseException:
        if listener:
            listener.close()
        raise
    if listener:
        listener.detach()  # now owned by the store
    return store


def _listener(host: str, port: int) -> socket.socket | None:
    """Create a socket that listens only at a loopback address; ``None`` for another address: torch then creates the socket."""
    literal = addresses.LOOPBACK if host == "localhost" else host
    if not addresses.is_loopback(literal):
        return None
    family = socket.AF_INET6 if ":" in literal else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((literal, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:  # torch shares the port of a store of this process, or raises an error
            return None
        raise dist.DistNetworkError(f"cannot listen at {host}:{port}: {error}") from error
    return listener


def loopback_interface() -> dict[str, str]:
    """The variable that makes gloo listen on this machine's loopback interface; by default it uses the interface of the host's name."""
    name = addresses.interface(addresses.LOOPBACK)
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


class Notes:
    """Notes between ranks when collectives are no longer possible, because some ranks hang or are lost.

    Notes are JSON values by name in the job's store. They use a separate connection because other threads may be blocked on the existing ones.
    If the store does not answer, no error is raised: :meth:`read` finds nothing, and :attr:`answers` is False.
    """

    def __init__(self, group: Group, topic: str) -> None:
        self.rank, self.world_size = group.rank, group.world_size
        self.answers = True
        """Whether the store answered the latest call."""
        store: Any = group.store
        self._store = dist.PrefixStore(f"notes/{topic}", store.clone()) if store is not None else None

    def write(self, name: str, value: Any) -> None:
        """Write a note; an existing note of the same name is replaced."""
        store = self._store
        if store is None or not self.answers:
            return

        def write() -> bool:
            store.set(name, json.dumps(value))
            return store.check([name])  # a set has no answer: over a broken connection it would seem to succeed

        self._result_within(ANSWER_S, write)

    def read_all(self, names: list[str]) -> list[Any] | None:
        """Return the notes of these names, in one request; ``None`` if one of them does not exist, or the store does not answer now."""
        store = self._store
        if store is None or not self.answers:
            return None

        def read() -> list[Any] | None:
            return [json.loads(value) for value in store.multi_get(names)] if store.check(names) else None

        notes: list[Any] | None = self._result_within(ANSWER_S, read)
        self.answers = True  # this is asked again and again, and one slow answer must not end it
        return notes

    def read(self, name: str, wait_s: float) -> Any:
        """Return the note of this name, waiting at most ``wait_s`` (s) for it; ``None`` if there is none."""
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

        return self._result_within(wait_s + ANSWER_S, read)

    def _result_within(self, seconds: float, call: Callable[[], Any]) -> Any:
        """Return the result of ``call``, run in a thread; ``None`` if it fails or takes longer: a broken connection blocks for minutes."""
        results: list[Any] = []

        def run() -> None:
            try:
                results.append(call())
            except (RuntimeError, ValueError):  # the store's errors are RuntimeErrors
                pass
            except BaseException as error:
                log_failure("fit-notes", "this rank's notes do not reach the others", error)

        thread = threading.Thread(target=run, name="fit-notes", daemon=True)
        thread.start()
        thread.join(seconds)
        self.answers = bool(results)
        return results[0] if results else None
