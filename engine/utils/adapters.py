"""Objects of other libraries, by what packages know about them."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

GROUP = "engine.adapters"


def adapted(value: Any) -> Any:
    """An object of another library as one of this, or ``value`` itself.

    An entry point of the group ``engine.adapters`` has the name of the library's package, and is a function that takes such an object.
    """
    packages = {each.__module__.partition(".")[0] for each in type(value).__mro__}
    if "engine" in packages:
        return value
    for point in entry_points(group=GROUP):
        if point.name in packages:
            return point.load()(value)
    return value
