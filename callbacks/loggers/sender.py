"""Makes a logger's calls in order, repeats them when they fail, and never stops a run; slow calls are made by a thread."""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from engine import HangError

_log = logging.getLogger("engine")

LARGE = 200
"""Largest number of images and other media that wait: each may have megabytes."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a medium's own file that may pass. Other errors concern the medium itself, such as an artifact that is missing."""


@dataclass(slots=True, eq=False)
class Item:
    """A call to make: of a :class:`callbacks.loggers.base.Logger`, its ``open``, ``scalars``, ``media``, ... with what they send."""

    call: Callable[[], object]
    record: list[Any] | None = None
    """JSON form of the call, saved in checkpoints while it waits; ``None``: lost with the process."""
    media: str = ""
    """Name of the medium that the call sends; if the call fails, only this medium is left out. Empty: no medium."""


class Sender:
    """Makes calls in order, in a thread of its own.

    Args:
        name: name of the logger, for messages.
        retries: how often a failed call is repeated, after 1, 2, 4, ... seconds, at most 30.
        limit: largest number of calls that wait; further calls are left out.
        threaded: ``False``: :meth:`submit` makes calls itself; only calls that send media, and calls submitted while the thread is at work, are left
            to the thread. For calls of 0.1 ms to local files: a thread that computes as long costs the training more than that, since each of its
            operations hands the interpreter over and back. A call that fails with an ``OSError`` (a full disk) is left to the thread, which
            tries it again until the end of the run, while later calls wait.
    """

    def __init__(self, name: str, retries: int, limit: int, threaded: bool = True) -> None:
        self._name, self._retries, self._limit = name, retries, limit
        self._items: deque[Item] = deque()  # the first one is under way
        self._changed = threading.Condition()
        self._close: Callable[[], None] | None = None
        self._abandoned = threading.Event()
        self._failed = self._blocked = False
        self._media = self._left_out = 0
        self._threaded = threaded
        self._thread: threading.Thread | None = None

    def submit(self, item: Item) -> None:
        """Make the call, at once or in the thread."""
        if self._failed:
            return
        is_done = not (self._threaded or item.media or self._items) and self._try_call(item)
        if not (is_done or self._enqueue(item)):
            self._left_out += 1
            if self._left_out == 1:
                _log.warning("%s does not keep up: some values are not sent", self._name)

    def _enqueue(self, item: Item) -> bool:
        """Leave the call to the thread. ``False``: too many calls wait."""
        self._start_thread()
        with self._changed:
            if len(self._items) >= self._limit or (item.media and self._media >= LARGE):
                return False
            self._items.append(item)
            self._media += bool(item.media)
            self._changed.notify()
            return True

    def waiting(self) -> list[list[Any]]:
        """Return the records of the calls that wait."""
        with self._changed:
            return [item.record for item in self._items if item.record is not None]

    def end(self, close: Callable[[], None], patience_s: float) -> None:
        """Make the waiting calls, then ``close``; give up after ``patience_s``."""
        if self._thread is None and not self._threaded:
            self._close = close
            self._try_call(Item(close))
            return
        thread = self._start_thread()
        with self._changed:
            self._close = close
            self._changed.notify()
        thread.join(patience_s)
        if thread.is_alive():
            self._abandoned.set()
            _log.error("%s did not answer within %g s: values that were not sent yet are lost", self._name, patience_s)

    def _start_thread(self) -> threading.Thread:
        if self._thread is None:
            self._thread = threading.Thread(target=self._make_calls, name=f"fit-{self._name}", daemon=True)
            self._thread.start()
        return self._thread

    def _make_calls(self) -> None:
        """Make the calls in order; the thread's target. An error of its own ends this logger, as one of the tracker does."""
        try:
            self._serve()
        except BaseException as error:
            with self._changed:
                self._failed, lost = True, len(self._items)
                self._items.clear()
            _log.error(
                "%s failed in its thread; the run continues without it, and what waited (%d) is lost: %s",
                self._name,
                lost,
                error,
                exc_info=error,
            )

    def _serve(self) -> None:
        while not self._abandoned.is_set():
            with self._changed:
                while not self._items and self._close is None:
                    self._changed.wait()
                item = self._items[0] if self._items else None
            if item is None:
                assert self._close is not None
                self._try_call(Item(self._close))
                return
            self._try_call(item)
            with self._changed:
                if self._items and self._items[0] is item:
                    self._items.popleft()
                    self._media -= bool(item.media)

    def _try_call(self, item: Item) -> bool:
        """Make a call, or give up. ``False``: its file cannot be written now, and the thread has to try again."""
        in_thread = threading.current_thread() is self._thread
        for attempt in count():
            try:
                item.call()
                break
            except HangError:
                raise
            except BaseException as error:  # some trackers raise SystemExit
                if not (in_thread or isinstance(error, (Exception, SystemExit))):
                    raise  # Ctrl-C in the training's thread
                if self._close is None and self._may_pass(item, error):
                    self._report_blocked(error)
                    if not in_thread:
                        return False
                    with self._changed:
                        self._changed.wait_for(lambda: self._close is not None, min(2.0**attempt, 30.0))
                    continue
                hopeless = self._failed or self._blocked or (item.media and isinstance(error, (TypeError, ValueError)))
                if attempt >= self._retries or hopeless:
                    self._give_up(item, error)
                    return True
            if in_thread and self._abandoned.wait(min(2.0**attempt, 30.0)):
                return True
        if self._blocked:
            self._blocked = False
            _log.warning("%s writes again, and what waited comes first", self._name)
        return True

    def _may_pass(self, item: Item, error: BaseException) -> bool:
        is_blocked = not self._threaded and not self._failed and isinstance(error, OSError)
        return is_blocked and (not item.media or getattr(error, "errno", None) in _FULL)

    def _report_blocked(self, error: BaseException) -> None:
        if not self._blocked:
            _log.error("%s cannot write: %s; the run continues, and what is logged waits", self._name, error)
        self._blocked = True

    def _give_up(self, item: Item, error: BaseException) -> None:
        if self._abandoned.is_set():
            return
        if self._failed:
            _log.debug("%s could not be closed", self._name, exc_info=error)
        elif self._blocked:
            with self._changed:
                self._failed, lost = True, len(self._items)
                self._items.clear()
            _log.error("%s could not write the last rows (%d), which are lost: %s", self._name, lost, error)
        elif item.media:
            _log.error("%s could not send %s and leaves it out: %s", self._name, item.media, error, exc_info=error)
        else:
            with self._changed:
                self._failed = True
                self._items.clear()
            _log.error("%s failed; the run continues without it: %s", self._name, error, exc_info=error)
