"""A server on this machine whose page follows runs: it asks for newer values while they train."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from socketserver import TCPServer
from types import FrameType, TracebackType
from typing import Any

from engine import terminal_text

from .page import MOST_POINTS, page
from .record import NAME
from .runs import CSV, read_runs

_logger = logging.getLogger("engine")
HOST = "127.0.0.1"
PORT = 8321
_NAMES = (HOST, "localhost", "[::1]")
"""Names of this machine by which a browser may ask. A page from elsewhere whose name leads here (DNS rebinding) asks by another."""
_DEPTHS = ("", "*/", "*/*/")
"""Where in a folder runs may be, as patterns."""


class ReportServer:
    """Serves the page of :func:`write_report`, which follows the runs in ``folders`` while they train, to browsers on this machine.

    As a context manager it ends with Ctrl-C or SIGTERM, without an exception::

        with ReportServer(["runs"]) as server:
            print(server.url)
            server.serve()

    Args:
        folders: folders of runs, as for :func:`write_report`.
        port: the port at 127.0.0.1; 0: any that is free.
        max_points: as for :func:`write_report`.

    Raises:
        FileNotFoundError: a folder has no run.
        ValueError: ``folders`` is empty, ``max_points`` is below 100, or the port cannot be had; the message says what to do.
    """

    def __init__(
        self, folders: Sequence[str | os.PathLike[str]], port: int = PORT, *, max_points: int = MOST_POINTS
    ) -> None:
        self._pages = _Pages([Path(folder).expanduser() for folder in folders], max_points)
        self._pages.check()
        try:
            self._server = _Server(self._pages, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            reason = "is in use by another process" if error.errno == errno.EADDRINUSE else "is for root only"
            raise ValueError(
                f"port {port} of {HOST} {reason}: give another one, --serve {PORT + 1 if port == PORT else PORT}, or --serve 0 for any that is free"
            ) from error
        self._before: dict[int, Any] = {}

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{HOST}:{self._server.server_address[1]}/"

    def __enter__(self) -> ReportServer:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, _stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._server.server_close()
        return isinstance(error, _Stopped)

    def serve(self) -> None:
        """Answer requests until a signal ends the block."""
        self._server.serve_forever(poll_interval=0.2)


class _Stopped(BaseException):
    """Ctrl-C or SIGTERM."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


class _Pages:
    """The page of the runs in some folders, made again when their files have changed."""

    def __init__(self, folders: Sequence[Path], max_points: int) -> None:
        if not folders or max_points < 100:
            raise ValueError(
                f"folders={list(map(str, folders))}, max_points={max_points}: give a folder, and at least 100 points"
            )
        self._folders, self._max_points = folders, max_points
        self._lock = threading.Lock()
        self._version, self._page = "", b""

    def check(self) -> None:
        """Check that each folder has a run, without reading the runs: the first page that is asked for does that.

        Raises:
            FileNotFoundError: a folder has no run.
        """
        for folder in self._folders:
            if not any(self._records_in(folder)):
                read_runs([folder])  # raises the error that says what is there

    def version(self) -> str:
        """A text that changes with the files of the runs."""
        facts = []
        for record in self._records():
            for path in (record, record.parent / "checkpoints"):
                try:
                    status = path.stat()
                except OSError:
                    continue
                facts.append((str(path), status.st_size, status.st_mtime_ns))
        return f"{hash(tuple(facts)):x}"

    def newest(self) -> bytes:
        """The page as the files are now."""
        with self._lock:
            version = self.version()
            if version != self._version:
                runs, evaluations = read_runs(self._folders)
                text = page(runs, self._max_points, evaluations, live=version)
                self._version, self._page = version, text.encode("utf-8", "replace")
            return self._page

    def _records(self) -> Iterator[Path]:
        """The files that runs write, in the folders and in the folders of these."""
        return chain.from_iterable(map(self._records_in, self._folders))

    def _records_in(self, folder: Path) -> Iterator[Path]:
        patterns = [f"{depth}{name}" for depth in _DEPTHS for name in (NAME, CSV)]
        return chain.from_iterable(folder.glob(pattern) for pattern in patterns)


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def __init__(self, pages: _Pages, port: int) -> None:
        self.pages = pages
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's looks the name of the machine up, which may take seconds
        self.server_name, self.server_port = HOST, self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer with the page, with its version, or with an error."""
        if self.headers.get("Host", "").rpartition(":")[0] not in _NAMES and self.headers.get("Host") not in _NAMES:
            self._answer(403, "text/plain", b"This server is for browsers on its own machine: ask for 127.0.0.1")
        elif self.path == "/version":
            self._answer(200, "text/plain", self.server.pages.version().encode())
        elif self.path == "/favicon.ico":
            self._answer(204, "text/plain", b"")
        elif self.path != "/":
            self._answer(404, "text/plain", b"There is nothing here: the page is /")
        else:
            try:
                text = self.server.pages.newest()
            except Exception as error:  # such as a folder that was removed; the next request may find it
                _logger.warning("the page cannot be made: %s", terminal_text(f"{type(error).__name__}: {error}"))
                _logger.debug("%s", traceback.format_exc())
                self._answer(500, "text/plain", f"{type(error).__name__}: {error}".encode("utf-8", "replace"))
                return
            self._answer(200, "text/html", text)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # the browser has closed the connection
            self.close_connection = True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no requests."""
