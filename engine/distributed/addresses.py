"""This machine's network addresses: the one that reaches another machine, its interface, and whether an address or port is available here."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Iterator

LOOPBACK = "127.0.0.1"
"""The address by which a machine reaches itself."""
_SIOCGIFADDR = 0x8915
"""The ``ioctl`` of Linux that returns an interface's IPv4 address."""


def resolve_host(host: str, port: int) -> Iterator[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Yield the addresses of ``host`` in the form that sockets take.

    Raises:
        OSError: this machine cannot resolve the name.
    """
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        if family in (socket.AF_INET, socket.AF_INET6):
            yield family, (str(address[0]), int(address[1]))


def address_towards(host: str, port: int) -> str:
    """The address of this machine from which it would reach ``host``. Nothing is sent.

    Raises:
        OSError: the name cannot be resolved, or there is no route.
    """
    problem: OSError = OSError(f"{host!r} has no address")
    for family, address in resolve_host(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError as error:
                problem = error
                continue
            return str(probe.getsockname()[0])
    raise problem


def is_own(host: str) -> bool:
    """Whether ``host`` is an address of this machine, or a name of one. An unknown name is not."""
    with contextlib.suppress(OSError):
        for family, (address, _) in resolve_host(host, 0):
            with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
                probe.bind((address, 0))
                return True
    return False


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of this machine now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def is_loopback(address: str | None) -> bool:
    """Whether ``address`` (or the name ``localhost``) is a loopback address, which reaches only this machine; False for ``None``."""
    return address is not None and (address in ("localhost", "::1") or address.startswith("127."))


def default_address() -> str | None:
    """The address at which other machines reach this one: that of the default route, else of any interface; ``None`` without a network."""
    with contextlib.suppress(OSError):
        # 192.0.2.1 is reserved for documentation: no machine has it, so the default route applies.
        return address_towards("192.0.2.1", 9)
    return next((address for _, address in interfaces() if not is_loopback(address)), None)


def interfaces() -> Iterator[tuple[str, str]]:
    """Yield the name and IPv4 address of each network interface that has one; nothing where they are unknown."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                record = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(record[20:24])


def interface(address: str) -> str | None:
    """The name of the network interface with this IPv4 address (``"eth0"``); ``None`` if unknown."""
    return next((name for name, candidate in interfaces() if candidate == address), None)
