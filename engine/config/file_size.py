"""Reads file sizes as people write them. Imports no torch."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def size_in_bytes(value: int | str) -> int:
    """Convert a size to bytes: a number of bytes, or text such as ``"5GB"`` or ``"200MiB"``.

    Raises:
        ValueError: ``value`` is not a size, or less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS or float(match[1]) * _UNITS[match[2].upper()] < 1:
        raise ValueError(f"max_shard_size={value!r} is not a size: give bytes, or text such as '5GB' or '200MiB'")
    return int(float(match[1]) * _UNITS[match[2].upper()])
