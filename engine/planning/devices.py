"""Reads devices, links and clusters from the texts for ``--device``, ``--network``, ``--nodes`` and ``--memory-limit``. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from engine.config.file_size import size_in_bytes
from engine.planning.device_table import ALIASES, DEVICES, DTYPES, SHORT, Link, Reached
from engine.planning.device_table import Hardware as Hardware
from engine.planning.rank_trace import KINDS
from engine.utils.errors import nearest

MOST_RANKS = 131_072
"""The maximum number of ranks in a plan. Each costs 0.7 ms, because torch's exchanges have a slot for every rank."""
_MEASURED = Reached(1.0, 1.0, 1.0)
_DESCRIBED = "memory, operations a second and bytes a second, as in 80GiB,1e15,3e12"
_PREFIX = "measured:"
"""The start of a description whose numbers were measured, as ``fit plan --measure`` prints it."""


def hardware(description: str | Hardware) -> Hardware:
    """The device with a name of :data:`DEVICES`, or the device that a description describes.

    Args:
        description: ``"h100"``; ``"80GiB,1e15,3e12"``: memory, floating point operations a second (in every dtype) and bytes a second of its memory;
            ``"80GiB,bf16=1e15,fp32=6e13,host=2e-6,dtensor=5e-5,3e12"``: the operations by dtype, and the seconds that the host needs to start one,
            and besides for one on a ``DTensor``;
            ``"h100,96GB"``, ``"cpu,16GiB,fp32=6e10,2e10"``: a known device, and the numbers in which this one differs; ``"measured:..."``: the
            numbers are what is reached, not what a vendor states.

    Raises:
        ValueError: the text is neither a name nor a description; the message names the nearest name.
    """
    if isinstance(description, Hardware):
        return description
    text, subject = str(description), f"device {description!r}"
    first, *settings = (part.strip() for part in text.removeprefix(_PREFIX).split(","))
    name = first.lower().replace("_", "-").replace(" ", "-")
    base = DEVICES.get(ALIASES.get(name, name))
    if base is None:
        if not settings and not first[:1].isdigit():
            raise ValueError(
                f"{subject} is unknown{nearest(name, [*DEVICES, *ALIASES])}; possible: {', '.join(DEVICES)}, or {_DESCRIBED}"
            )
        return _described(text, subject, DEVICES["h100"], [first, *settings], "as those of h100")
    if len(settings) < 2 and text.startswith(_PREFIX):
        raise ValueError(f"{subject}: give what was measured, as fit plan --measure prints it: {_DESCRIBED}")
    if not settings:
        return base
    if len(settings) == 1:
        return replace(base, memory=_memory(settings[0], subject), name=text)
    return _described(text, subject, base, settings, f"and the rest as those of {base.name}")


def _described(text: str, subject: str, base: Hardware, parts: list[str], links_from: str) -> Hardware:
    """The device with the memory, operations a second and bandwidth in ``parts``; the rest as ``base``. ``links_from`` says in words where its links
    are from."""
    if len(parts) < 3:
        raise ValueError(f"{subject}: give {_DESCRIBED}")
    memory, *speeds, bandwidth = parts
    peaks: dict[str, float] = {}
    host_seconds = {"host": base.dispatch, "dtensor": base.dtensor}
    numbers = [speed for speed in speeds if not speed.startswith(("host=", "dtensor="))]
    for speed in speeds:
        dtype, equals, number = speed.partition("=")
        if dtype in host_seconds and equals:
            host_seconds[dtype] = _number(number, subject, "seconds")
            continue
        if not equals and len(numbers) > 1:
            raise ValueError(f"{subject}: with several numbers name their dtypes, as in bf16={speed},fp32=6e13")
        if equals and dtype not in SHORT:
            raise ValueError(f"{subject}: unknown dtype {dtype!r}{nearest(dtype, [*SHORT, *host_seconds])}")
        value = _number(number if equals else speed, subject, "operations a second")
        peaks |= {SHORT[dtype]: value} if equals else dict.fromkeys(DTYPES, value)
    if not peaks:
        raise ValueError(f"{subject}: give {_DESCRIBED}")
    peaks.setdefault("float32", min(peaks.values()))
    return replace(
        base,
        name=text,
        memory=_memory(memory, subject),
        peaks=peaks,
        bandwidth=_number(bandwidth, subject, "bytes a second"),
        dispatch=host_seconds["host"],
        dtensor=host_seconds["dtensor"],
        reached=_MEASURED if text.startswith(_PREFIX) else Reached(),
        source=f"given; links between devices, unless a network is given, {links_from}",
        notes=(),
    )


def linked(device: Hardware, network: str) -> Hardware:
    """Return ``device`` with the links that ``network`` describes.

    Args:
        device: the device; its latencies apply where ``network`` gives none.
        network: ``"450GB/s,50GB/s"``: bandwidth of one device, in one direction, within and between nodes; ``"450e9:2e-6,400Gbit/s:5e-6"``: with
            the seconds of a step of a ring. One link alone holds for both. ``"450GB/s,reduce_scatter=300GB/s:3e-6,50GB/s"``: a kind of collective
            that differs follows its link. With ``measured:`` before it, what collectives reach rather than what the vendor states.

    Raises:
        ValueError, TypeError: ``network`` is not such a text.
    """
    subject = f"network {network!r}"
    if not isinstance(network, str):
        raise TypeError(f"{subject}: give text, such as '450GB/s,50GB/s'")
    parts: list[list[str]] = []
    for part in network.removeprefix(_PREFIX).split(","):
        if "=" in part and parts:
            parts[-1].append(part.strip())
        else:
            parts.append([part.strip()])
    if len(parts) > 2 or not all(part[0] for part in parts):
        raise ValueError(f"{subject}: give one or two links, within and between nodes, as in 450GB/s,50GB/s")
    links = [
        _link(part, old, subject)
        for part, old in zip(parts * 2 if len(parts) == 1 else parts, (device.within, device.between), strict=False)
    ]
    reached = replace(device.reached, links=1.0 if network.startswith(_PREFIX) else Reached().links)
    return replace(device, within=links[0], between=links[1], reached=reached)


def rate(value: float | str, what: str) -> float:
    """Bytes a second: ``"5GB/s"``, ``"40Gbit/s"``, ``5e9``.

    Args:
        value: a number or a text.
        what: name of the rate, for errors.

    Raises:
        ValueError: the value is not a rate above 0.
    """
    return _rate(str(value), f"{what} {value!r}")


def _link(parts: list[str], old: Link, subject: str) -> Link:
    """The link that ``parts`` describe: first its bandwidth and latency, then the kinds of collectives that differ. ``old`` gives the latency where
    none is stated."""

    def numbers(part: str) -> tuple[float, float]:
        bandwidth, colon, latency = part.partition(":")
        return _rate(bandwidth, subject), _number(latency, subject, "seconds") if colon else old.latency

    kinds = {}
    for part in parts[1:]:
        kind, _, link = part.partition("=")
        if kind not in KINDS:
            raise ValueError(
                f"{subject}: unknown kind of collective {kind!r}{nearest(kind, KINDS)}; possible: {', '.join(KINDS)}"
            )
        kinds[kind] = numbers(link)
    return Link(*numbers(parts[0]), kinds)


def _rate(text: str, subject: str) -> float:
    """Bytes a second from text such as ``450GB/s`` or ``400Gbit/s``."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][+-]?\d+)?)\s*([kKMGT]i?)?(B|bit|b)?(?:/s|ps)?", text.strip())
    if match is None:
        raise ValueError(f"{subject}: {text!r} is not a bandwidth: give bytes a second (450e9), 450GB/s, or 400Gbit/s")
    scale = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    prefix = match[2] or ""
    unit = 1024.0 ** "_KMGT".index(prefix[0].upper()) if prefix.endswith("i") else scale[prefix]
    value = _number(match[1], subject, "bytes a second") * unit
    return value / 8 if match[3] in ("bit", "b") else value


def _number(text: str, subject: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{subject}: {text!r} is not a positive number of {what}")
    return value


def _memory(text: str, subject: str) -> int:
    try:
        return size_in_bytes(text)
    except ValueError:
        raise ValueError(f"{subject}: {text!r} is not a size: give bytes, or text such as 80GiB or 80GB") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The ranks of a job and their hardware. Created by :func:`cluster_of`."""

    world_size: int
    nodes: int
    device: Hardware
    """Device of each rank, with the links between ranks."""

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
    chosen = hardware(device)
    if network is not None:
        chosen = linked(chosen, network)
    if memory_limit is not None:
        chosen = replace(chosen, memory=_limit(memory_limit))
    return Cluster(world_size=world_size, nodes=machines_for(world_size, nodes, chosen.per_node), device=chosen)


def machines_for(world_size: int, nodes: int | None, per_node: int) -> int:
    """The number of nodes of a job.

    Args:
        world_size: ranks of the job.
        nodes: the requested number; ``None``: as few as have room for the ranks, where a node has room for ``per_node``.

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
    count = -(-world_size // per_node) if nodes is None else nodes
    if world_size % count:
        division = (
            f"nodes={nodes}"
            if nodes is not None
            else f"{count} nodes of up to {per_node} devices: give the number of nodes"
        )
        raise ValueError(f"world_size={world_size} ranks do not divide evenly over {division}")
    return count


def _limit(text: int | str) -> int:
    try:
        return size_in_bytes(text)
    except ValueError:
        raise ValueError(
            f"memory limit {text!r} is not a size above 0: give bytes, or text such as '2GiB' or '80GB'"
        ) from None
