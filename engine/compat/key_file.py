"""Reads another trainer's settings file such that no key is ignored: each is converted, noted or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.utils.errors import nearest


class Section:
    """A mapping in the file. If its keys start with ``prefix``, they are used without it."""

    def __init__(self, values: Mapping[str, Any], path: str, prefix: str, file: KeyFile | None) -> None:
        self.values = {str(key).removeprefix(prefix): value for key, value in values.items()}
        self._written = {str(key).removeprefix(prefix): str(key) for key in values}
        self._path, self._file = path, file
        self._known: dict[str, None] = {}

    @property
    def file(self) -> KeyFile:
        """The file that the section is in."""
        assert self._file is not None
        return self._file

    def take_value(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``, or the default if it is missing or null, and mark the key as handled."""
        self._known[key] = None
        value = self.values.get(key)
        return default if value is None else value

    def note(self, key: str, reason: str) -> None:
        """Add a note that ``key``, if the file has it, has no meaning here, with the reason."""
        if (value := self.take_value(key)) is not None:
            self.file.notes.append(f"{self._name(key)}: {value}: {reason}")

    def remark(self, text: str) -> None:
        """Add a note that belongs to no key."""
        self.file.notes.append(text)

    def refuse(self, key: str, reason: str) -> None:
        """Record that ``key`` is refused, because it would change the training and has no counterpart."""
        value, name = self.take_value(key), self._name(key)
        self.file.refused.append(f"{self.file.origin_of(name)}: {name}: {value}: {reason}")

    def refuse_others(
        self,
        reasons: Mapping[str, str],
        neutral: Sequence[Any] = (None, False, 0, 1, "false", "none", "no", "", "auto"),
    ) -> None:
        """Record a refusal for each key of ``reasons`` whose value is not in ``neutral``, the values without an effect."""
        for key, reason in reasons.items():
            value = self.take_value(key)
            if not any(
                type(value) is type(neutral_value) and value == neutral_value for neutral_value in neutral
            ):  # 1 is neutral, true is not
                self.refuse(key, reason)

    def drop_rest(self, *keys: str) -> None:
        """Mark keys as handled without using them, because they belong to an option that was not chosen."""
        for key in keys:
            self.take_value(key)

    def unknown(self) -> None:
        """Record a refusal for each key that was not handled."""
        for key in self.values:
            if key not in self._known:
                name = self._name(key)
                self.file.refused.append(
                    f"{self.file.origin_of(name)}: {name!r} is not known{nearest(key, self._known)}"
                )

    def _name(self, key: str) -> str:
        return ".".join(filter(None, (self._path, self._written.get(key, key))))


class KeyFile(Section):
    """A settings file of another trainer, and the result of its conversion: settings, notes and refusals."""

    def __init__(self, values: Mapping[str, Any], origin: str, origins: Mapping[str, str]) -> None:
        super().__init__(values, "", "", None)
        self._file, self._origin, self._origins = self, origin, origins
        self.settings: dict[str, Any] = {}
        """Our settings -> their values."""
        self.notes: list[str] = []
        """Notes on keys without a meaning here, with the reasons."""
        self.refused: list[str] = []
        """Errors about keys that would change the training and have no counterpart."""
        self.launch = ""
        """The command that starts the processes that the file asks for."""
        self._parts: dict[str, Section] = {}

    def section(self, key: str, prefix: str) -> Section:
        """The mapping at ``key``, whose keys may start with ``prefix``; an empty one if there is none."""
        if key not in self._parts:
            values = self.take_value(key, {})
            if not isinstance(values, Mapping):
                self.refuse(key, "must be a mapping")
                values = {}
            self._parts[key] = Section(values, key, prefix, self)
        return self._parts[key]

    def drop(self, key: str) -> None:
        """Add a note that the section ``key`` does not apply, and mark it as handled."""
        if self.take_value(key):
            self.notes.append(f"{key}: does not apply to the rest of the file, and Accelerate does not read it either")

    def set(self, name: str, value: Any) -> None:
        """Set our setting ``name``."""
        self.settings[name] = value

    def origin_of(self, name: str) -> str:
        """The file and the line of a key, for messages."""
        return self._origins.get(name, self._origin)

    def finish(self, sections: Sequence[str]) -> None:
        """Record a refusal for each key of the file and its sections that was not handled; ``sections``: the keys of all possible sections."""
        for key in sections:
            self.take_value(key)
        for part in (self, *self._parts.values()):
            part.unknown()


def flag(value: Any) -> bool:
    """Convert a value to a bool; texts such as ``"true"`` and ``"yes"``, which launchers write, count as true."""
    return value.strip().lower() in ("true", "yes", "1", "on") if isinstance(value, str) else bool(value)
