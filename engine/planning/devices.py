"""Devices and links as ``--device`` and ``--network`` name or describe them. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import replace

from engine.config.file_size import size_in_bytes
from engine.planning.device_table import ALIASES, DEVICES, DTYPES, SHORT, Link, Reached
from engine.planning.device_table import Hardware as Hardware
from engine.planning.rank_trace import KINDS
from engine.utils.errors import nearest

_MEASURED = Reached(1.0, 1.0, 1.0)
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
    given = str(wanted)
    first, *rest = (part.strip() for part in given.removeprefix(_PREFIX).split(","))
    name = first.lower().replace("_", "-").replace(" ", "-")
    known = DEVICES.get(ALIASES.get(name, name))
    if known is None and not rest:
        raise ValueError(
            f"--device {wanted!r} is unknown{nearest(name, [*DEVICES, *ALIASES])}; possible: {', '.join(DEVICES)}, or memory, operations a second "
            "and bytes a second: 80GiB,1e15,3e12"
        )
    if known is not None and not rest:
        return known
    if known is None:
        rest = [first, *rest]
    base = known or DEVICES["h100"]
    if known is not None and len(rest) == 1:
        return replace(base, memory=_memory(rest[0], given), name=given)
    return _described(
        given, base, rest, "as those of h100" if known is None else "and the rest as those of " + known.name
    )


def _described(given: str, base: Hardware, parts: list[str], others: str) -> Hardware:
    memory, *speeds, bandwidth = parts if len(parts) > 1 else (parts[0], "")
    if not speeds:
        raise ValueError(
            f"--device {given!r}: give memory, operations a second and bytes a second, as in 80GiB,1e15,3e12"
        )
    peaks: dict[str, float] = {}
    hosts = {"host": base.dispatch, "dtensor": base.dtensor}
    numbers = [each for each in speeds if not each.startswith(("host=", "dtensor="))]
    for each in speeds:
        dtype, equals, number = each.partition("=")
        if dtype in hosts and equals:
            hosts[dtype] = _number(number, given, "seconds")
            continue
        if not equals and len(numbers) > 1:
            raise ValueError(f"--device {given!r}: with several numbers name their dtypes, as in bf16={each},fp32=6e13")
        if equals and dtype not in SHORT:
            raise ValueError(f"--device {given!r}: unknown dtype {dtype!r}{nearest(dtype, [*SHORT, *hosts])}")
        value = _number(number if equals else each, given, "operations a second")
        peaks |= {SHORT[dtype]: value} if equals else dict.fromkeys(DTYPES, value)
    if not peaks:
        raise ValueError(f"--device {given!r}: give its operations a second, as in 80GiB,1e15,3e12")
    peaks.setdefault("float32", min(peaks.values()))
    return replace(
        base,
        name=given,
        memory=_memory(memory, given),
        peaks=peaks,
        bandwidth=_number(bandwidth, given, "bytes a second"),
        dispatch=hosts["host"],
        dtensor=hosts["dtensor"],
        reached=_MEASURED if given.startswith(_PREFIX) else Reached(),
        source=f"given; links between devices, unless --network gives others, {others}",
        notes=(),
    )


def network(text: str, device: Hardware) -> Hardware:
    """``device`` with other links.

    Args:
        text: ``"450GB/s,50GB/s"``: of one device, in one direction, within and between nodes; ``"450e9:2e-6,400Gbit/s:5e-6"``: with the seconds of a
            step of a ring. One link alone holds for both. ``"450GB/s,reduce_scatter=300GB/s:3e-6,50GB/s"``: a kind of collective that differs follows
            its link. With ``measured:`` before it, what collectives reach rather than what the vendor states.
        device: whose latencies hold where none is given.

    Raises:
        ValueError: it is not such a text.
    """
    parts: list[list[str]] = []
    for part in text.removeprefix(_PREFIX).split(","):
        if "=" in part and parts:
            parts[-1].append(part.strip())
        else:
            parts.append([part.strip()])
    if len(parts) > 2 or not all(part[0] for part in parts):
        raise ValueError(f"--network {text!r}: give one or two links, within and between nodes: 450GB/s,50GB/s")
    links = [
        _link(part, old, text)
        for part, old in zip(parts * 2 if len(parts) == 1 else parts, (device.within, device.between), strict=False)
    ]
    reached = replace(device.reached, links=1.0 if text.startswith(_PREFIX) else Reached().links)
    return replace(device, within=links[0], between=links[1], reached=reached)


def _link(parts: list[str], old: Link, text: str) -> Link:
    def numbers(part: str) -> tuple[float, float]:
        rate, colon, latency = part.partition(":")
        return _rate(rate, text), _number(latency, text, "seconds") if colon else old.latency

    kinds = {}
    for part in parts[1:]:
        kind, _, given = part.partition("=")
        if kind not in KINDS:
            raise ValueError(
                f"--network {text!r}: {kind!r} is no kind of collective{nearest(kind, KINDS)}; possible: {', '.join(KINDS)}"
            )
        kinds[kind] = numbers(given)
    return Link(*numbers(parts[0]), kinds)


def _rate(text: str, whole: str) -> float:
    found = re.fullmatch(r"([0-9.]+(?:[eE][+-]?\d+)?)\s*([kKMGT]i?)?(B|bit|b)?(?:/s|ps)?", text.strip())
    if found is None:
        raise ValueError(f"{whole!r}: {text!r} is not a bandwidth: give bytes a second (450e9), 450GB/s, or 400Gbit/s")
    scale = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    prefix = found[2] or ""
    unit = 1024.0 ** "_KMGT".index(prefix[0].upper()) if prefix.endswith("i") else scale[prefix]
    value = _number(found[1], whole, "bytes a second") * unit
    return value / 8 if found[3] in ("bit", "b") else value


def rate(text: str, option: str) -> float:
    """Bytes a second: ``"5GB/s"``, ``"40Gbit/s"``, ``5e9``. ``option``: named in errors."""
    return _rate(text, f"{option} {text}")


def _number(text: str, whole: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{whole!r}: {text!r} is not a positive number of {what}")
    return value


def _memory(text: str, whole: str) -> int:
    try:
        return size_in_bytes(text)
    except ValueError:
        raise ValueError(
            f"--device {whole!r}: {text!r} is not a size: give bytes, or text such as 80GiB or 80GB"
        ) from None
