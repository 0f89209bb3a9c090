"""How a logger's calls are made: in order, repeated when they fail, without ever stopping a run, and what is slow by a thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine import HangError

_log = logging.getLogger("engine")

LARGE = 200
"""How many images and other media wait at most: each may have megabytes."""


@dataclass(slots=True, eq=False)
class Item:
    """A call to make."""

    call: Callable[[], None]
    record: Any = None
    """What a checkpoint keeps of it while it waits; ``None``: nothing."""
    media: str = ""
    """The name of the medium that it sends, if it sends one: if that fails, only this medium is left out."""


class Sender:
    """Makes calls in order, in a thread of its own.

    Args:
        name: of the logger, for messages.
        retries: how often a failed call is repeated, after 1, 2, 4, ... seconds, at most 30.
        limit: how many calls wait at most; more are left out.
        threaded: ``False``: the thread makes only those that send media, and those put while it is at work; others are made by :meth:`put`.
            For calls of 0.1 ms: a thread that computes as long costs the training more than that, since each of its operations hands
            the interpreter over and back.
    """

    def __init__(self, name: str, retries: int, limit: int, threaded: bool = True) -> None:
        self._name, self._retries, self._limit = name, retries, limit
        self._items: deque[Item] = deque()  # the first one is under way
        self._changed = threading.Condition()
        self._close: Callable[[], None] | None = None
        self._abandoned = threading.Event()
        self._failed = False
        self._media = self._left_out = 0
        self._threaded = threaded
        self._thread: threading.Thread | None = None

    def put(self, item: Item) -> None:
        """Make this call soon."""
        if self._failed:
            return
        if not (self._threaded or item.media or self._items):
            self._make(item)
        elif not self._queued(item):
            self._left_out += 1
            if self._left_out == 1:
                _log.warning("%s does not keep up: some values are not sent", self._name)

    def _queued(self, item: Item) -> bool:
        """Leave the call to the thread; ``False``: too many wait."""
        self._started()
        with self._changed:
            if len(self._items) >= self._limit or (item.media and self._media >= LARGE):
                return False
            self._items.append(item)
            self._media += bool(item.media)
            self._changed.notify()
            return True

    def waiting(self) -> list[Any]:
        """The records of calls that are not made yet."""
        with self._changed:
            return [item.record for item in self._items if item.record is not None]

    def end(self, close: Callable[[], None], patience_s: float) -> None:
        """Make the waiting calls, then ``close``; give up after ``patience_s``."""
        if self._thread is None and not self._threaded:
            self._make(Item(close))
            return
        thread = self._started()
        with self._changed:
            self._close = close
            self._changed.notify()
        thread.join(patience_s)
        if thread.is_alive():
            self._abandoned.set()
            _log.error("%s did not answer within %g s: values that were not sent yet are lost", self._name, patience_s)

    def _started(self) -> threading.Thread:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"fit-{self._name}", daemon=True)
            self._thread.start()
        return self._thread

    def _work(self) -> None:
        while not self._abandoned.is_set():
            with self._changed:
                while not self._items and self._close is None:
                    self._changed.wait()
                item = self._items[0] if self._items else None
            if item is None:
                assert self._close is not None
                self._make(Item(self._close))
                return
            self._make(item)
            with self._changed:
                if self._items and self._items[0] is item:
                    self._items.popleft()
                    self._media -= bool(item.media)

    def _make(self, item: Item) -> None:
        for attempt in range(self._retries + 1):
            try:
                item.call()
                return
            except HangError:
                raise
            except (Exception, SystemExit) as error:  # some trackers raise SystemExit
                hopeless = self._failed or (item.media and isinstance(error, (TypeError, ValueError)))
                if attempt == self._retries or hopeless:
                    self._give_up(item, error)
                    return
            if threading.current_thread() is self._thread and self._abandoned.wait(min(2.0**attempt, 30.0)):
                return

    def _give_up(self, item: Item, error: BaseException) -> None:
        if self._abandoned.is_set():
            return
        if self._failed:
            _log.debug("%s could not be closed", self._name, exc_info=error)
        elif item.media:
            _log.error("%s could not send %s and leaves it out: %s", self._name, item.media, error, exc_info=error)
        else:
            with self._changed:
                self._failed = True
                self._items.clear()
            _log.error("%s failed; the run continues without it: %s", self._name, error, exc_info=error)
