"""An exception that one thread raises in another: for a training that hangs in Python code."""

from __future__ import annotations

import ctypes
import threading


class Interrupt:
    """Raises an exception in the thread that created this (or called :meth:`arm` last): at most once, and never after :meth:`withdraw`.

    Args:
        kind: the exception's class, called without arguments.
    """

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self.withdrawn = threading.Event()
        """The thread continues: nothing is raised in it from now on."""
        self._lock = threading.Lock()
        self._struck = False
        self.arm()

    def arm(self) -> None:
        """From now on the calling thread may be interrupted."""
        with self._lock:
            self._thread, self._open = threading.get_ident(), True
        self.withdrawn.clear()

    def strike(self) -> bool:
        """Raise the exception, without a message, wherever the other thread is now. False: it continues, or was interrupted before."""
        with self._lock:
            if not self._open or self._struck:
                return False
            self._struck = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(self.kind))
            return True

    def withdraw(self) -> None:
        """The thread no longer needs an interruption. It calls this itself: a pending exception ends here."""
        while True:
            try:
                with self._lock:
                    self._open = False
                # The interpreter delivers a pending exception within a few jumps. Clearing it, PyThreadState_SetAsyncExc(thread, None), would
                # leave Python 3.11's evaluation loop with a flag that is never cleared: it hangs under a debugger or a profiler.
                for _ in range(100):
                    pass
                break
            except self.kind:
                continue
        self.withdrawn.set()
