"""Stores for the ranks and the agent of one machine, unreachable from other machines."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta

import torch.distributed as dist

from engine.distributed import address

LOCAL = "127.0.0.1"


def serve(host: str, port: int, *, timeout: timedelta, world_size: int | None = None) -> dist.TCPStore:
    """A store for processes of this machine. For a loopback address (or ``localhost``) it listens only there, for any other on all interfaces.

    torch's store has no authentication: anyone who reaches the port may read and write. Not for several machines, where the first one's own
    address may be ``localhost`` while the others use its name.

    Args:
        port: 0 for any free port; ``.port`` has its number.

    Raises:
        torch.distributed.DistError: the port is taken.
    """
    listener = _listener(host, port)
    try:
        found = dist.TCPStore(
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
    return found


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens only at a loopback address; ``None``: torch creates one."""
    literal = LOCAL if host == "localhost" else host
    if not address.is_loopback(literal):
        return None
    family = socket.AF_INET6 if ":" in literal else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((literal, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:  # torch shares a port within a process, or raises
            return None
        raise dist.DistNetworkError(f"cannot listen at {host}:{port}: {error}") from error
    return listener


def loopback_interface() -> dict[str, str]:
    """The variable that makes gloo listen on this machine's loopback interface; by default it uses that of the host's name."""
    found = address.interface(LOCAL)
    return {"GLOO_SOCKET_IFNAME": found} if found else {}
