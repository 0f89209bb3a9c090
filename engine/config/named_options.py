"""A strategy or a precision that is given by its name with options: ``{name: deepspeed, stage: 3}``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NamedOptions:
    """The name of a strategy or a precision, with options that its class will check. Created by a :class:`engine.config.kinds.ByName`."""

    name: str
    options: dict[str, Any]
    origins: dict[str, str] = field(default_factory=dict, compare=False)
    """Where the name and each option come from, inner keys by their dotted path; a key that is missing here comes from code."""

    def __str__(self) -> str:
        return "{" + ", ".join(f"{key}: {value}" for key, value in self.as_dict().items()) + "}"

    def as_dict(self) -> dict[str, Any]:
        """The options as a mapping, after the entry ``name``."""
        return {"name": self.name, **self.options}

    def error_prefix(self, key: str = "name") -> str:
        """The start of an error about an option: its origin; empty if the option comes from code."""
        origin = self.origins.get(key, "code")
        return "" if origin == "code" else f"{origin}: "
