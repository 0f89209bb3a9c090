"""Reads a file of Accelerate: every key is used, noted or refused, and none is ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.utils.errors import nearest


class Section:
    """A mapping of the file; its keys may have a prefix, which is removed here."""

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
        """The value of ``key``, which counts as handled; the default if it is missing or null."""
        self._known[key] = None
        value = self.values.get(key)
        return default if value is None else value

    def note(self, key: str, reason: str) -> None:
        """Note that a key in the file has no meaning here, with the reason."""
        if (value := self.take_value(key)) is not None:
            self.file.notes.append(f"{self._name(key)}: {value}: {reason}")

    def remark(self, text: str) -> None:
        """Note ``text``, which belongs to no key."""
        self.file.notes.append(text)

    def refuse(self, key: str, reason: str) -> None:
        """Refuse ``key``, which would change the training and has no counterpart."""
        value, name = self.take_value(key), self._name(key)
        self.file.refused.append(f"{self.file.origin_of(name)}: {name}: {value}: {reason}")

    def refuse_others(
        self,
        reasons: Mapping[str, str],
        neutral: Sequence[Any] = (None, False, 0, 1, "false", "none", "no", "", "auto"),
    ) -> None:
        """Refuse the keys of ``reasons`` whose value has an effect."""
        for key, reason in reasons.items():
            value = self.take_value(key)
            if not any(
                type(value) is type(neutral_value) and value == neutral_value for neutral_value in neutral
            ):  # 1 is neutral, true is not
                self.refuse(key, reason)

    def drop_rest(self, *keys: str) -> None:
        """Note the section's remaining keys, which belong to an option that was not chosen."""
        for key in keys:
            self.take_value(key)

    def unknown(self) -> None:
        """Refuse the keys that were not handled."""
        for key in self.values:
            if key not in self._known:
                name = self._name(key)
                self.file.refused.append(
                    f"{self.file.origin_of(name)}: {name!r} is not known{nearest(key, self._known)}"
                )

    def _name(self, key: str) -> str:
        return ".".join(filter(None, (self._path, self._written.get(key, key))))


class KeyFile(Section):
    """A settings file of another trainer, and what it becomes here: settings, notes and refusals."""

    def __init__(self, values: Mapping[str, Any], origin: str, origins: Mapping[str, str]) -> None:
        super().__init__(values, "", "", None)
        self._file, self._origin, self._origins = self, origin, origins
        self.settings: dict[str, Any] = {}
        """Our names and values."""
        self.notes: list[str] = []
        """Keys without a meaning here, each with the reason."""
        self.refused: list[str] = []
        """Keys that would change the training and have no counterpart."""
        self.launch = ""
        """The command that starts as many processes as the file says."""
        self._parts: dict[str, Section] = {}

    def section(self, key: str, prefix: str) -> Section:
        """The mapping at ``key``; an empty one if there is none."""
        if key not in self._parts:
            values = self.take_value(key, {})
            if not isinstance(values, Mapping):
                self.refuse(key, "must be a mapping")
                values = {}
            self._parts[key] = Section(values, key, prefix, self)
        return self._parts[key]

    def drop(self, key: str) -> None:
        """Note a section that belongs to another choice, without reading it."""
        if self.take_value(key):
            self.notes.append(f"{key}: does not apply to the rest of the file, and Accelerate does not read it either")

    def set(self, name: str, value: Any) -> None:
        """Set our setting ``name``."""
        self.settings[name] = value

    def origin_of(self, name: str) -> str:
        """The file and line of a key."""
        return self._origins.get(name, self._origin)

    def finish(self, sections: Sequence[str]) -> None:
        """Refuse the keys that were not handled, of the file and its sections."""
        for key in sections:
            self.take_value(key)
        for part in (self, *self._parts.values()):
            part.unknown()


def flag(value: Any) -> bool:
    """A bool, also in the text form that launchers write."""
    return value.strip().lower() in ("true", "yes", "1", "on") if isinstance(value, str) else bool(value)
