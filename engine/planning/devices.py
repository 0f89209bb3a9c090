"""Devices, links and clusters as ``--device``, ``--network``, ``--nodes`` and ``--memory-limit`` name or describe them. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from engine.config.file_size import size_in_bytes
from engine.planning.device_table import ALIASES, DEVICES, DTYPES, SHORT, Link, Reached
from engine.planning.device_table import Hardware as Hardware
from engine.planning.rank_trace import KINDS
from engine.utils.errors import nearest

MOST_RANKS = 131_072
"""Ranks of a plan: each costs 0.7 ms, since torch's exchanges have a place for every rank."""
_MEASURED = Reached(1.0, 1.0, 1.0)
_DESCRIBED = "memory, operations a second and bytes a second, as in 80GiB,1e15,3e12"
_PREFIX = "measured:"
"""Before a description: its numbers are what the machine reaches, as ``fit plan --measure`` prints them."""


def hardware(wanted: str | Hardware) -> Hardware:
    """The device of a name of :data:`DEVICES`, or of a description.

    Args:
        wanted: ``"h100"``; ``"80GiB,1e15,3e12"``: memory, floating point operations a second (in every dtype) and bytes a second of its memory;
            ``"80GiB,bf16=1e15,fp32=6e13,host=2e-6,dtensor=5e-5,3e12"``: the operations by dtype, and the seconds that the host needs to start one,
            and besides for one on a ``DTensor``;
            ``"h100,96GB"``, ``"cpu,16GiB,fp32=6e10,2e10"``: what else differs from a known device; ``"measured:..."``: the numbers are what is
            reached, not what a vendor states.

    Raises:
        ValueError: neither; the message names the nearest name.
    """
    if isinstance(wanted, Hardware):
        return wanted
    given, whole = str(wanted), f"device {wanted!r}"
    first, *rest = (part.strip() for part in given.removeprefix(_PREFIX).split(","))
    name = first.lower().replace("_", "-").replace(" ", "-")
    known = DEVICES.get(ALIASES.get(name, name))
    if known is None:
        if not rest and not first[:1].isdigit():
            raise ValueError(
                f"{whole} is unknown{nearest(name, [*DEVICES, *ALIASES])}; possible: {', '.join(DEVICES)}, or {_DESCRIBED}"
            )
        return _described(given, whole, DEVICES["h100"], [first, *rest], "as those of h100")
    if len(rest) < 2 and given.startswith(_PREFIX):
        raise ValueError(f"{whole}: give what was measured, as fit plan --measure prints it: {_DESCRIBED}")
    if not rest:
        return known
    if len(rest) == 1:
        return replace(known, memory=_memory(rest[0], whole), name=given)
    return _described(given, whole, known, rest, f"and the rest as those of {known.name}")


def _described(given: str, whole: str, base: Hardware, parts: list[str], others: str) -> Hardware:
    if len(parts) < 3:
        raise ValueError(f"{whole}: give {_DESCRIBED}")
    memory, *speeds, bandwidth = parts
    peaks: dict[str, float] = {}
    hosts = {"host": base.dispatch, "dtensor": base.dtensor}
    numbers = [each for each in speeds if not each.startswith(("host=", "dtensor="))]
    for each in speeds:
        dtype, equals, number = each.partition("=")
        if dtype in hosts and equals:
            hosts[dtype] = _number(number, whole, "seconds")
            continue
        if not equals and len(numbers) > 1:
            raise ValueError(f"{whole}: with several numbers name their dtypes, as in bf16={each},fp32=6e13")
        if equals and dtype not in SHORT:
            raise ValueError(f"{whole}: unknown dtype {dtype!r}{nearest(dtype, [*SHORT, *hosts])}")
        value = _number(number if equals else each, whole, "operations a second")
        peaks |= {SHORT[dtype]: value} if equals else dict.fromkeys(DTYPES, value)
    if not peaks:
        raise ValueError(f"{whole}: give {_DESCRIBED}")
    peaks.setdefault("float32", min(peaks.values()))
    return replace(
        base,
        name=given,
        memory=_memory(memory, whole),
        peaks=peaks,
        bandwidth=_number(bandwidth, whole, "bytes a second"),
        dispatch=hosts["host"],
        dtensor=hosts["dtensor"],
        reached=_MEASURED if given.startswith(_PREFIX) else Reached(),
        source=f"given; links between devices, unless a network is given, {others}",
        notes=(),
    )


def linked(device: Hardware, network: str) -> Hardware:
    """``device`` with other links.

    Args:
        device: whose latencies hold where none is given.
        network: ``"450GB/s,50GB/s"``: of one device, in one direction, within and between nodes; ``"450e9:2e-6,400Gbit/s:5e-6"``: with the seconds of
            a step of a ring. One link alone holds for both. ``"450GB/s,reduce_scatter=300GB/s:3e-6,50GB/s"``: a kind of collective that differs
            follows its link. With ``measured:`` before it, what collectives reach rather than what the vendor states.

    Raises:
        ValueError, TypeError: it is not such a text.
    """
    whole = f"network {network!r}"
    if not isinstance(network, str):
        raise TypeError(f"{whole}: give text, such as '450GB/s,50GB/s'")
    parts: list[list[str]] = []
    for part in network.removeprefix(_PREFIX).split(","):
        if "=" in part and parts:
            parts[-1].append(part.strip())
        else:
            parts.append([part.strip()])
    if len(parts) > 2 or not all(part[0] for part in parts):
        raise ValueError(f"{whole}: give one or two links, within and between nodes, as in 450GB/s,50GB/s")
    links = [
        _link(part, old, whole)
        for part, old in zip(parts * 2 if len(parts) == 1 else parts, (device.within, device.between), strict=False)
    ]
    reached = replace(device.reached, links=1.0 if network.startswith(_PREFIX) else Reached().links)
    return replace(device, within=links[0], between=links[1], reached=reached)


def rate(wanted: float | str, what: str) -> float:
    """Bytes a second: ``"5GB/s"``, ``"40Gbit/s"``, ``5e9``.

    Args:
        wanted: a number or a text.
        what: the rate is of, for errors.

    Raises:
        ValueError: it is not a rate above 0.
    """
    return _rate(str(wanted), f"{what} {wanted!r}")


def _link(parts: list[str], old: Link, whole: str) -> Link:
    def numbers(part: str) -> tuple[float, float]:
        bandwidth, colon, latency = part.partition(":")
        return _rate(bandwidth, whole), _number(latency, whole, "seconds") if colon else old.latency

    kinds = {}
    for part in parts[1:]:
        kind, _, given = part.partition("=")
        if kind not in KINDS:
            raise ValueError(
                f"{whole}: unknown kind of collective {kind!r}{nearest(kind, KINDS)}; possible: {', '.join(KINDS)}"
            )
        kinds[kind] = numbers(given)
    return Link(*numbers(parts[0]), kinds)


def _rate(text: str, whole: str) -> float:
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?\d+)?)\s*([kKMGT]i?)?(B|bit|b)?(?:/s|ps)?", text.strip())
    if found is None:
        raise ValueError(f"{whole}: {text!r} is not a bandwidth: give bytes a second (450e9), 450GB/s, or 400Gbit/s")
    scale = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    prefix = found[2] or ""
    unit = 1024.0 ** "_KMGT".index(prefix[0].upper()) if prefix.endswith("i") else scale[prefix]
    value = _number(found[1], whole, "bytes a second") * unit
    return value / 8 if found[3] in ("bit", "b") else value


def _number(text: str, whole: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{whole}: {text!r} is not a positive number of {what}")
    return value


def _memory(text: str, whole: str) -> int:
    try:
        return size_in_bytes(text)
    except ValueError:
        raise ValueError(f"{whole}: {text!r} is not a size: give bytes, or text such as 80GiB or 80GB") from None


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
        ValueError, TypeError: the ranks do not divide evenly over the nodes, or one of them is not a number of at least 1;
            more than :data:`MOST_RANKS` ranks.
    """
    for name, value in (("world_size", world_size), ("nodes", 1 if nodes is None else nodes)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}={value!r} must be an int")
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if world_size > MOST_RANKS:
        raise ValueError(
            f"world_size={world_size}: a plan takes at most {MOST_RANKS} ranks; plan that many: further replicas hardly change what a rank needs"
        )
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
