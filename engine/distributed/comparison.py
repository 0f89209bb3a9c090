"""Compare values over the ranks of a group."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from engine.distributed.collectives import gather_json
from engine.distributed.group import Group
from engine.utils.checksums import checksum
from engine.utils.errors import CheckError

_PLAIN = (bool, int, float, str, type(None))
MAX_LISTED = 10
"""The maximum number of differences that an error lists."""


def fingerprint(value: Tensor) -> str:
    """The dtype, the shape and a checksum of all bits, as text."""
    return f"{value.dtype}, {list(value.shape)}, checksum {checksum(value):08x}"


def comparable(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer's parameter group that are plain values on the host, and so can be compared over ranks."""
    values = {name: _on_host(value) for name, value in group.items() if name != "params"}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value))
    }


def _on_host(value: Any) -> Any:
    """The number in a tensor of one element on the CPU, which a learning rate may be; other values as they are."""
    return value.item() if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1 else value


def check_equal(group: Group, what: str, facts: dict[str, Any], advice: str = "") -> None:
    """Raise a ``CheckError`` unless ``facts`` are the same on all ranks of ``group``.

    Args:
        what: the compared objects, for the message.
        advice: the end of the message; by default that of ``check=True``.
    """
    facts_by_rank = gather_json(group, {name: str(value) for name, value in facts.items()})
    first = facts_by_rank[0]
    differences = [
        f"  {name}: rank 0 has {first.get(name, 'none of that name')}, rank {rank} has {rank_facts.get(name, 'none')}"
        for rank, rank_facts in enumerate(facts_by_rank)
        for name in dict.fromkeys([*first, *rank_facts])
        if rank_facts.get(name) != first.get(name)
    ]
    if differences:
        more = f"\n  and {len(differences) - MAX_LISTED} more" if len(differences) > MAX_LISTED else ""
        listed = "\n".join(differences[:MAX_LISTED]) + more
        origin = "" if advice else "check=True: "
        raise CheckError(
            f"{origin}the {what} differ between the ranks:\n{listed}\n{advice or 'All ranks must build the same objects.'}"
        )


def check_alike(group: Group, what: str, facts: dict[str, Any], advice: str) -> None:
    """Do as :func:`check_equal` does, and send no more than a checksum where nothing differs."""
    if group.world_size > 1 and len(set(gather_json(group, sum_of(facts)))) > 1:
        check_equal(group, what, facts, advice)


def sum_of(facts: dict[str, Any]) -> int:
    """A checksum of facts that are text, numbers or ``None``."""
    return zlib.crc32(repr(facts).encode())


def plain_text(value: Any) -> str:
    """A value as text that is the same on all ranks: objects count by their class."""
    if isinstance(value, _PLAIN):
        return str(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {plain_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(plain_text, value))})"
    if "__str__" in vars(type(value)):  # a duration
        return str(value)
    name = getattr(value, "name", None)
    return f"{type(value).__name__}({name if isinstance(name, str) else ''})"
