"""Stores that the ranks and the agent of one machine meet in, out of reach of other machines."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta

import torch.distributed as dist

from engine.distributed import address

LOCAL = "127.0.0.1"


def serve(host: str, port: int, *, timeout: timedelta, world_size: int | None = None) -> dist.TCPStore:
    """A store for processes of this machine. At a loopback address (or ``localhost``) it listens there only, at any other on all interfaces.

    torch's store asks nobody who they are: whoever reaches the port may read and write. Not for several machines, where the first one's own
    address may be ``localhost`` while the others call it by its name.

    Args:
        port: 0 for any that is free; ``.port`` tells which.

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
        listener.detach()  # the store's now
    return found


def _listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens at a loopback address alone; ``None``: torch is to make one."""
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
        if error.errno == errno.EADDRINUSE:  # torch shares a port within a process; it decides, and tells
            return None
        raise dist.DistNetworkError(f"cannot listen at {host}:{port}: {error}") from error
    return listener


def loopback_interface() -> dict[str, str]:
    """The variable that makes gloo listen on this machine's loopback interface; otherwise it takes the one of the host's name."""
    found = address.interface(LOCAL)
    return {"GLOO_SOCKET_IFNAME": found} if found else {}
