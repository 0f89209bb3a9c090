"""Where a run is planned: its ranks, the machines that they are on, and the device of each. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.config.file_size import size_in_bytes
from engine.planning.devices import Hardware, hardware, linked


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The ranks of a job and their hardware. Created by :func:`cluster_of`."""

    world_size: int
    nodes: int
    device: Hardware
    """Of each rank, with the links between them."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node."""
        return self.world_size // self.nodes


def cluster_of(
    world_size: int,
    nodes: int | None = None,
    device: str | Hardware = "h100",
    network: str | None = None,
    memory_limit: int | str | None = None,
) -> Cluster:
    """The cluster that arguments of :meth:`engine.Fit.plan`, or options of ``fit plan``, describe.

    Raises:
        ValueError: one of them is wrong, or the ranks do not divide evenly over the nodes.
    """
    found = hardware(device)
    if network is not None:
        found = linked(found, network)
    if memory_limit is not None:
        found = replace(found, memory=_limit(memory_limit))
    return Cluster(world_size=world_size, nodes=machines_for(world_size, nodes, found.per_node), device=found)


def machines_for(world_size: int, nodes: int | None, per_node: int) -> int:
    """The nodes of a job.

    Args:
        world_size: its ranks.
        nodes: that were asked for; ``None``: as few as have room for the ranks, where a node has room for ``per_node``.

    Raises:
        ValueError, TypeError: the ranks do not divide evenly over the nodes, or one of them is not a number of at least 1.
    """
    for name, value in (("world_size", world_size), ("nodes", nodes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name}={value!r} must be an int")
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    wanted = -(-world_size // per_node) if nodes is None else nodes
    if world_size % wanted:
        given = (
            f"nodes={nodes}"
            if nodes is not None
            else f"{wanted} nodes of up to {per_node} devices: give the number of nodes"
        )
        raise ValueError(f"world_size={world_size} ranks do not divide evenly over {given}")
    return wanted


def _limit(text: int | str) -> int:
    try:
        return size_in_bytes(text)
    except ValueError:
        raise ValueError(
            f"memory limit {text!r} is not a size above 0: give bytes, or text such as '2GiB' or '80GB'"
        ) from None
