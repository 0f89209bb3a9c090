"""An exception that one thread raises in another: for a training that stands still in Python code."""

from __future__ import annotations

import ctypes
import threading


class Interrupt:
    """Raises an exception in the thread that has made this (or has called :meth:`arm` last): at most once, and never after :meth:`withdraw`.

    Args:
        kind: the exception's class. It is made without arguments.
    """

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind
        self.withdrawn = threading.Event()
        """The thread is back: nothing is raised in it from now on."""
        self._lock = threading.Lock()
        self._struck = False
        self.arm()

    def arm(self) -> None:
        """From now on the calling thread may be interrupted."""
        with self._lock:
            self._thread, self._open = threading.get_ident(), True
        self.withdrawn.clear()

    def strike(self) -> bool:
        """Raise the exception in the thread, which must be another one; False: the thread is back, or was interrupted before."""
        with self._lock:
            if not self._open or self._struck:
                return False
            self._struck = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(self.kind))
            return True

    def withdraw(self) -> None:
        """The thread needs no interruption any more. It calls this itself: an exception that is on its way to it ends here."""
        while True:
            try:
                with self._lock:
                    self._open = False
                # The interpreter delivers what is pending within a few jumps. Taking it back, PyThreadState_SetAsyncExc(thread, None), would
                # leave Python 3.11's evaluation loop with a signal that nobody takes down: it never gets on under a debugger or a profiler.
                for _ in range(100):
                    pass
                break
            except self.kind:
                continue
        self.withdrawn.set()
