"""Compares versions of packages."""

from __future__ import annotations

import importlib.metadata
import operator

from packaging.version import Version

_COMPARISONS = {
    ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<=": operator.le, "<": operator.lt
}  # fmt: skip


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Whether a version, or that of an installed package, satisfies a comparison: ``compare_versions("torch", ">=", "2.9")``."""
    version = library_or_version
    version = version if isinstance(version, Version) else Version(importlib.metadata.version(version))
    if operation not in _COMPARISONS:
        raise ValueError(f"compare_versions(operation={operation!r}): possible are {', '.join(_COMPARISONS)}")
    return bool(_COMPARISONS[operation](version, Version(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the installed torch satisfies a comparison. The version comes from its metadata, which lacks the ``+cu...`` of ``torch.__version__``
    in PyPI's builds."""
    return compare_versions("torch", operation, version)
