"""Kinds of settings: which values a user may give, which the library reads, and the error for any other value.

Each field of :class:`engine.config.settings.Settings` has a kind. Imports no torch, because shell completion reads the words of kinds.
"""

from __future__ import annotations

import copy
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from engine.config import strategy_names, yaml_text
from engine.config.duration import Duration, parse
from engine.config.named_options import NamedOptions
from engine.config.yaml_text import Node
from engine.utils import device_names
from engine.utils.errors import nearest
from engine.utils.paths import expanded

PRECISIONS: dict[str, str] = {
    **{name: name for name in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "fp8-mixed")},
    "no": "32-true",  # the names of Accelerate
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
    "fp8": "fp8-mixed",
    "32": "32-true",  # the short names of Lightning
    "16": "16-mixed",
    "64": "64-true",
}
"""Accepted name of a precision -> the library's name of it."""
COMPILE_OPTIONS = ("fullgraph", "dynamic", "backend", "mode", "options")
"""Options of ``torch.compile``."""

Recompute = str | int | None
Compile = bool | str | dict[str, Any]
Offload = bool | str | int

RUN_ENTRIES = ("checkpoints", "hang", "predictions", "profiler", "run.json", "sent", "tensorboard")
"""Files and folders that the library writes into a run's folder: into ``root_dir`` itself, for the first run without a name."""

_FLAGS = ("true", "false")
_LISTS = (list, tuple, set, frozenset)


def not_possible(name: str, value: object, possible: str) -> ValueError:
    """The error for a value that has the right type but is not possible. ``possible`` says which values are."""
    return ValueError(f"{name}={value!r} is not possible: give {possible}")


def wrong_type(name: str, value: object, possible: str) -> TypeError:
    """The error for a value whose type is not possible."""
    return TypeError(f"{name}={value!r} is of type {type(value).__name__}: give {possible}")


def unknown_word(name: str, value: object, words: Iterable[str], possible: str) -> ValueError:
    """The error for a word that is not among ``words``; it names the nearest one."""
    return ValueError(f"{name}={value!r} is unknown{nearest(value, words)}; possible: {possible}")


def is_whole_number(value: object) -> bool:
    """Check whether ``value`` is an int, including numpy's. A bool is not: ``max_steps=True`` is a mistake."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


class Kind:
    """Base class of kinds: which values a setting accepts in code, in YAML and in a shell, and the form in which the library reads them.

    The subclasses stand below: :class:`WholeNumber`, :class:`Word`, :class:`Flag`, ... Each field of :class:`engine.config.settings.Settings` has
    one, and ``KINDS`` there has them by the name of the setting.
    """

    accepts: str
    """The annotation of ``Fit``'s argument, as source text; its names are imported by ``engine/fit.py``."""
    words: tuple[str, ...] = ()
    """Words that a shell completes, as they are written in YAML."""
    as_written: bool = False
    """Whether text in YAML is taken literally: ``no`` is a precision, and ``2024`` may be a folder."""
    code_only: bool = False
    """Whether the value can be given in code only, and not by files, variables or the command line."""

    def normalized(self, name: str, value: Any) -> Any:
        """Check the value of the setting ``name``, and return it in the form that the library reads. That form is accepted, too.

        Raises:
            ValueError, TypeError: the value is not possible; the message names the setting, the value and what is possible.
        """
        raise NotImplementedError

    def from_yaml(self, node: Node) -> Any:
        """The plain value of a YAML node, which :meth:`normalized` then checks.

        Raises:
            ValueError: the node has no value of this kind; the message is to be put after the setting's name.
        """
        if node is None:
            raise ValueError("is empty: give a value, or null for None")
        return node.value if self.as_written and yaml_text.is_text(node) else yaml_text.construct(node)

    def as_mapping(self, value: Any) -> dict[Any, Any] | None:
        """Copy ``value`` into a mapping, in which the command line sets one key; ``None``: a value like this has no keys."""
        return copy.deepcopy(dict(value)) if isinstance(value, Mapping) else None


def _or_none(none: str) -> str:
    """The end of a list of possible values, if ``None`` is one of them and means what ``none`` says."""
    return f", or None for {none}" if none else ""


class WholeNumber(Kind):
    """An int from ``minimum`` to ``maximum``; ``None`` is possible if ``none`` says what it means."""

    def __init__(self, minimum: int, maximum: int | None = None, *, none: str = "") -> None:
        self.accepts = "int | None" if none else "int"
        self._minimum, self._maximum, self._none = minimum, maximum, none
        self._possible = f"an int of at least {minimum}" if maximum is None else f"an int from {minimum} to {maximum}"
        self._possible += _or_none(none)

    def normalized(self, name: str, value: Any) -> Any:
        if value is None and self._none:
            return None
        if not is_whole_number(value):
            raise wrong_type(name, value, self._possible)
        number = operator.index(value)
        if number < self._minimum or (self._maximum is not None and number > self._maximum):
            raise not_possible(name, value, self._possible)
        return number


class Word(Kind):
    """One of a few words; ``None`` is possible if ``none`` says what it means."""

    def __init__(self, *choices: str, none: str = "") -> None:
        self.accepts = "str | None" if none else "str"
        self.words = (*choices, "null") if none else choices
        self.as_written = not none
        self._choices, self._none = choices, none
        self._possible = " or ".join(map(repr, choices)) + _or_none(none)

    def normalized(self, name: str, value: Any) -> str | None:
        if value is None and self._none:
            return None
        if not isinstance(value, str):
            raise wrong_type(name, value, self._possible)
        if value.lower() not in self._choices:
            raise unknown_word(name, value, self._choices, self._possible)
        return value.lower()


class Flag(Kind):
    """A bool, or one of a few words; ``None`` is possible if ``none`` says what it means."""

    def __init__(self, *choices: str, none: str = "") -> None:
        self.accepts = " | ".join(["bool", *(["str"] if choices else []), *(["None"] if none else [])])
        self.words = (*_FLAGS, *choices, *(["null"] if none else []))
        self._choices, self._none = choices, none
        self._possible = " or ".join(["True", "False", *map(repr, choices)]) + _or_none(none)

    def normalized(self, name: str, value: Any) -> bool | str | None:
        if value is None and self._none:
            return None
        if isinstance(value, bool) or (isinstance(value, str) and value in self._choices):
            return value
        if isinstance(value, str):
            raise unknown_word(name, value, self._choices, self._possible)
        raise wrong_type(name, value, self._possible)

    def from_yaml(self, node: Node) -> Any:
        return _as_flag(super().from_yaml(node))


class FlagOrNumber(Kind):
    """A bool, or an int of at least 0."""

    accepts = "bool | int"
    words = _FLAGS
    _number = WholeNumber(0)

    def normalized(self, name: str, value: Any) -> Any:
        return value if isinstance(value, bool) else self._number.normalized(name, value)


class Interval(Kind):
    """A duration of more than 0; ``None`` means what ``none`` says."""

    accepts = "int | float | str | timedelta | Duration | None"
    as_written = True

    def __init__(self, none: str = "never") -> None:
        self._none = none

    def normalized(self, name: str, value: int | float | str | timedelta | Duration | None) -> Duration | None:
        duration = _duration(name, value)
        if duration is not None and duration.value == 0:
            raise not_possible(name, value, f"a duration of more than 0{_or_none(self._none)}")
        return duration


class Time(Kind):
    """A time of at least ``minimum`` seconds; ``None`` is possible if ``none`` says what it means."""

    as_written = True

    def __init__(self, minimum: int = 0, *, none: str = "") -> None:
        self.accepts = "str | timedelta | Duration" + (" | None" if none else "")
        self._minimum, self._none = minimum, none

    def normalized(self, name: str, value: int | float | str | timedelta | Duration | None) -> Duration | None:
        duration = _duration(name, value)
        if duration is None:
            if not self._none:
                raise wrong_type(name, value, "a time such as '30 min'")
            return None
        if duration.unit != "seconds":
            raise not_possible(name, value, f"a time such as '30 s', '10 min' or '1.5 h'; {value!r} means {duration}")
        if duration.value < self._minimum:
            raise not_possible(name, value, f"a time of at least '{self._minimum} s'{_or_none(self._none)}")
        return duration


class Maximum(Kind):
    """A number of at least 0; 0 and ``None`` both mean what ``none`` says."""

    accepts = "float | None"

    def __init__(self, *, none: str) -> None:
        self._possible = f"a number of at least 0{_or_none(none)}"

    def normalized(self, name: str, value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, (bool, str)) or not hasattr(value, "__float__"):
            raise wrong_type(name, value, self._possible)
        number = float(value)
        if math.isnan(number) or number < 0:
            raise not_possible(name, value, self._possible)
        return number or None


class BatchLimit(Kind):
    """A number of batches, or a fraction of all batches. ``None`` means all batches; it becomes 0 if ``zero_is_all``."""

    def __init__(self, *, zero_is_all: bool = False) -> None:
        self.accepts = "int | float" if zero_is_all else "int | float | None"
        self._all = 0 if zero_is_all else None

    def normalized(self, name: str, value: Any) -> int | float | None:
        possible = "an int of at least 0 (a number of batches), a float in (0, 1] (a fraction of them), or None for all"
        if value is None:
            return self._all
        if isinstance(value, float):
            if not 0 <= value <= 1:
                raise not_possible(name, value, possible)
            return value or 0
        if not is_whole_number(value):
            raise wrong_type(name, value, possible)
        if value < 0:
            raise not_possible(name, value, possible)
        return operator.index(value)


class Schedule(Kind):
    """An int of at least 1, or a schedule ``{first epoch: int}`` of such ints."""

    accepts = "int | Mapping[int, int]"

    def normalized(self, name: str, value: Any) -> int | dict[int, int]:
        possible = "an int of at least 1, or a schedule {epoch: int} such as {0: 1, 5: 4}"
        if not isinstance(value, Mapping):
            if not is_whole_number(value):
                raise wrong_type(name, value, possible)
            if value < 1:
                raise not_possible(name, value, possible)
            return operator.index(value)
        if not value or not all(
            is_whole_number(number) and number >= minimum
            for item in value.items()
            for number, minimum in zip(item, (0, 1), strict=True)
        ):
            raise not_possible(name, value, possible)
        return {operator.index(epoch): operator.index(value[epoch]) for epoch in sorted(value)}

    def as_mapping(self, value: Any) -> dict[Any, Any] | None:
        return super().as_mapping(value) if isinstance(value, Mapping) else {0: value}


def parsed_stages(name: str, setting: Mapping[Any, Any]) -> list[tuple[Duration, Any]]:
    """The stages of a schedule ``{start: value}``, in order: the first starts at 0, and all others in one unit.

    Raises:
        ValueError, TypeError: a start is not possible.
    """
    starts: list[tuple[Duration, Any]] = []
    for key, value in setting.items():
        if key in (0, "0") and not isinstance(key, bool):
            start = Duration("samples", 0)
        elif is_whole_number(key) or (isinstance(key, str) and not key.strip()[-1:].isalpha()):
            raise ValueError(
                f"{name}={setting!r}: the start {key!r} has no unit: give one, as in '{key} samples', '{key} steps' or "
                f"'{key} tokens'; only 0 needs none"
            )
        else:
            start = _duration(name, key) or Duration("samples", 0)
        starts.append((start, value))
    starts.sort(key=lambda stage: stage[0].value)
    units = sorted({start.unit for start, _ in starts if start.value})
    if len(units) > 1 or units == ["seconds"]:
        problem = (
            "starts in a time are others in each run"
            if units == ["seconds"]
            else f"starts in {' and '.join(units)} cannot be ordered"
        )
        raise ValueError(f"{name}={setting!r}: {problem}: give all of them in samples, tokens, steps or epochs")
    if not starts or starts[0][0].value:
        raise ValueError(
            f"{name}={setting!r}: no stage starts at 0, so nothing holds at the training's beginning: add a start of 0"
        )
    if len({start.value for start, _ in starts}) < len(starts):
        raise ValueError(f"{name}={setting!r}: two stages start at the same time: leave one of them out")
    return starts


class BatchSize(Kind):
    """The samples of a step, the tokens of a step as text, or a schedule ``{start: either}``; starts are durations, and the first is 0."""

    accepts = "int | str | Mapping[int | str | Duration, int | str] | None"

    def normalized(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            return self._size(name, value)
        starts = [(start, self._size(name, size)) for start, size in parsed_stages(name, value)]
        return {str(start) if start.value else 0: size for start, size in starts}

    def _size(self, name: str, value: Any) -> int | str:
        possible = (
            "an int of at least 1 (samples), '524_288 tokens', a schedule such as {0: 256, '5e8 tokens': 512}, or None for what the loader's batches "
            "give"
        )
        if is_whole_number(value):
            if value < 1:
                raise not_possible(name, value, possible)
            return operator.index(value)
        if not isinstance(value, (str, Duration)):
            raise wrong_type(name, value, possible)
        size = _duration(name, value)
        if size is None or size.unit not in ("samples", "tokens") or not size.value:
            raise not_possible(name, value, possible)
        return int(size.value) if size.unit == "samples" else str(size)


class Folder(Kind):
    """The kind of a setting whose value is a path; ``~`` is the home directory."""

    accepts = "str | Path"
    as_written = True

    def normalized(self, name: str, value: Any) -> Path:
        if not isinstance(value, str | Path) and not hasattr(value, "__fspath__"):
            raise wrong_type(name, value, "a path")
        if not str(value).strip():
            raise not_possible(name, value, "a path; '.' is the current directory")
        if len(str(value).splitlines()) > 1:  # a log would show it as two lines
            raise not_possible(name, value, "a path without line ends")
        return Path(expanded(value))


class RunName(Kind):
    """The kind of a setting that names runs: one part of a path. ``None``: no name."""

    accepts = "str | None"
    words = ("null",)
    _possible = "a name such as 'lr=0.1', which becomes a folder in root_dir, or None for no name"
    _numbered = re.compile(r"(.*_)?version_\d+", re.IGNORECASE)
    _longest = 200

    def normalized(self, name: str, value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str):
            raise wrong_type(name, value, self._possible)
        if reason := self._reason_against(value):
            raise ValueError(f"{name}={value!r} is not possible: {reason}. Give {self._possible}")
        return value

    def from_yaml(self, node: Node) -> Any:
        return node.value if node is not None and yaml_text.is_text(node) else super().from_yaml(node)

    def _reason_against(self, value: str) -> str:
        """Why a folder cannot have this name; empty if it can."""
        if not value.strip():
            return "it is empty"
        if "/" in value or "\\" in value:
            return "it has a slash, and a name is one folder. root_dir is for the folders above it"
        if value.startswith((".", "-", "~")):
            return f"it begins with {value[0]!r}"
        if value != value.strip():
            return "it begins or ends with a space"
        if not value.isprintable():
            return "it has characters that cannot be printed"
        if len(os.fsencode(value)) > self._longest:
            return f"it has more than {self._longest} bytes"
        if self._numbered.fullmatch(value):
            return "later runs of one name get such an ending"
        if value.lower() in RUN_ENTRIES:
            return "a run without a name keeps something else in a folder or file of this name"
        return ""


class Accelerator(Kind):
    """The name of a kind of device."""

    accepts = "str"
    words = device_names.KNOWN
    as_written = True

    def normalized(self, name: str, value: Any) -> str:
        possible = (
            " or ".join(map(repr, self.words)) + ", or a device that a package adds to torch, once it is imported"
        )
        if not isinstance(value, str):
            raise wrong_type(name, value, possible)
        word = value.lower()
        if word not in self.words and not device_names.is_added(word):
            raise unknown_word(name, value, self.words, possible + device_names.device_hint(word))
        return word


class Devices(Kind):
    """A number of devices, their indices, or ``"auto"``."""

    accepts = "int | str | Sequence[int]"
    words = ("auto",)

    def normalized(self, name: str, value: Any) -> int | str | tuple[int, ...]:
        possible = "'auto', an int of at least 1, or distinct device indices such as [0, 2]"
        if isinstance(value, str) and value != "auto":
            try:
                numbers = [int(part) for part in value.split(",")]
            except ValueError:
                raise unknown_word(name, value, self.words, possible) from None
            value = numbers if "," in value else numbers[0]
        if value == "auto":
            return "auto"
        if isinstance(value, (list, tuple)):
            if not value or not all(is_whole_number(i) and i >= 0 for i in value) or len(set(value)) != len(value):
                raise not_possible(name, value, possible)
            return tuple(map(operator.index, value))
        if not is_whole_number(value):
            raise wrong_type(name, value, possible)
        if value < 1:
            raise not_possible(name, value, possible)
        return operator.index(value)


class CallbackObjects(Kind):
    """A list of callbacks; a single callback is a list of one."""

    accepts = "Callback | Sequence[Callback] | None"
    code_only = True

    def normalized(self, name: str, value: Any) -> tuple[Any, ...]:
        items = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
        for item in items:
            if isinstance(item, type):
                raise TypeError(f"{name} has the class {item.__name__}: give an object, {item.__name__}(...)")
            if isinstance(item, (str, bytes, int, float, dict, set)) or item is None:
                raise TypeError(f"{name} has {item!r} of type {type(item).__name__}: give a list of Callback objects")
        return items

    def from_yaml(self, node: Node) -> Any:
        raise ValueError("are objects and can only be given in code: Fit(callbacks=[...])")


class ByName(Kind):
    """Base class of kinds whose value is a name, a mapping with a name and options, or an object, which is not checked here."""

    as_written = True
    example: str
    """A name and an option, as an example in the error about a mapping without a name."""

    def from_mapping(
        self, setting: str, value: Mapping[str, Any], origins: Mapping[str, str] | None = None
    ) -> NamedOptions | str:
        """The name and options in a mapping; the name alone if there are no options.

        Args:
            setting: the setting's name, for errors.
            origins: where the mapping (key ``""``) and each of its keys come from; by default from code.

        Raises:
            ValueError: there is no ``name``.
            TypeError: ``name`` or a key is not a string.
        """
        origins = dict(origins or {})
        first = next(iter(origins.values()), "code")
        error_prefix = "" if first == "code" else f"{first}: "
        name = value.get("name")
        if "name" not in value:
            raise ValueError(
                f"{error_prefix}{setting}={dict(value)!r} has no 'name': give the mapping one, such as {{name: {self.example}}}"
            )
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"{error_prefix}{setting}.name={name!r} is of type {type(name).__name__}: give the name as text"
            )
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{origins.get(str(key), first)}: {setting} has the key {key!r}, which is not a name")
        options = {key: option for key, option in value.items() if key != "name"}
        return NamedOptions(name, options, origins) if options else name

    def from_yaml(self, node: Node) -> Any:
        value = super().from_yaml(node)
        if isinstance(value, dict):
            nodes = {key: value_node for key, value_node, _ in yaml_text.items_with_lines(node, "")}
            if "name" in nodes and yaml_text.is_text(nodes["name"]):
                value["name"] = nodes["name"].value
        return value

    def as_mapping(self, value: Any) -> dict[Any, Any] | None:
        if isinstance(value, NamedOptions):
            value = value.as_dict()
        return {"name": value} if isinstance(value, str) else super().as_mapping(value)


class StrategyName(ByName):
    """A strategy by name, or a strategy object."""

    accepts = "str | Mapping[str, Any] | Strategy"
    example = "deepspeed, stage: 3"

    @property
    def words(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the library's strategies, and of those that other packages register."""
        registered = (point.name for point in entry_points(group=strategy_names.GROUP))
        return ("auto", *strategy_names.BUILT_IN, *registered)

    def normalized(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            value = self.from_mapping(name, value)
        if value is None or value == "" or isinstance(value, (bool, int, float, type, *_LISTS)):
            possible = "the name of a strategy, a mapping with its name and settings, or a strategy object"
            raise wrong_type(name, value, possible)
        if isinstance(value, NamedOptions) and value.name == "auto":
            first = next(iter(value.options))
            raise ValueError(
                f"{value.error_prefix(first)}strategy 'auto' takes no settings, and {first!r} was given: "
                "give name: ddp, fsdp, ... with it"
            )
        return value


class PrecisionName(ByName):
    """The number formats of a model, by name."""

    accepts = "str | int | Mapping[str, Any] | Precision | FP8"
    words = tuple(PRECISIONS)
    example = "fp8-mixed, recipe: rowwise"

    def normalized(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            value = self.from_mapping(name, value)
        if isinstance(value, NamedOptions):
            precision, first = precision_name(value.name), next(iter(value.options))
            if precision != "fp8-mixed":
                raise ValueError(
                    f"{value.error_prefix(first)}precision {value.name!r} takes no settings, and {first!r} was given: "
                    "only 'fp8-mixed' does"
                )
            return replace(value, name=precision)
        if isinstance(value, _LISTS):
            raise wrong_type(name, value, "the name of a precision, or a mapping with its name and settings")
        return precision_name(value) if value is None or isinstance(value, (str, bool, int, float, type)) else value


class Recomputation(Kind):
    """The setting for recomputing activations: ``None``, ``"full"`` (or ``True``), ``"selective"``, or an int n for every n-th block."""

    accepts = "str | int | None"
    words = ("full", "selective", "null")

    def normalized(self, name: str, value: Any) -> Recompute:
        possible, choices = "'full', 'selective', an int n of at least 1 (every n-th block), or None", self.words[:2]
        if value is None or value is False:
            return None
        if value is True:
            return "full"
        if isinstance(value, str):
            if value not in choices:
                raise unknown_word(name, value, choices, possible)
            return value
        if not isinstance(value, int):
            raise wrong_type(name, value, possible)
        if value < 1:
            raise not_possible(name, value, possible)
        return value


class Offloading(Kind):
    """The setting for activation offload: ``False``, ``True``, ``"blocks"``, or an int n for the first n blocks."""

    accepts = "bool | str | int"
    words = (*_FLAGS, "blocks")

    def normalized(self, name: str, value: Any) -> Offload:
        possible = "True or False, 'blocks', or an int n of at least 1 (the first n blocks)"
        if value is None:
            return False
        if isinstance(value, bool) or value == "blocks":
            return value
        if isinstance(value, str):
            raise unknown_word(name, value, ["blocks"], possible)
        if not is_whole_number(value):
            raise wrong_type(name, value, possible)
        if value < 1:
            raise not_possible(name, value, possible)
        return operator.index(value)


class Compilation(Kind):
    """The setting for ``torch.compile``: ``False``, ``True`` (the whole model), ``"blocks"``, or a dict of its options, with ``"blocks"`` or not."""

    accepts = "bool | str | dict[str, Any]"
    words = (*_FLAGS, "blocks")

    def normalized(self, name: str, value: Any) -> Compile:
        keys = ("blocks", *COMPILE_OPTIONS)
        possible = f"True or False, 'blocks', or a dict of {', '.join(keys)}"
        if isinstance(value, Mapping):
            for key in value:
                if key not in keys:
                    raise ValueError(
                        f"{name} has the key {key!r}, which is unknown{nearest(str(key), keys)}; possible: {', '.join(keys)}"
                    )
            return dict(value)
        if isinstance(value, bool) or value == "blocks":
            return value
        if isinstance(value, str):
            raise unknown_word(name, value, ["blocks"], possible)
        raise wrong_type(name, value, possible)

    def from_yaml(self, node: Node) -> Any:
        return _as_flag(super().from_yaml(node))

    def as_mapping(self, value: Any) -> dict[Any, Any] | None:
        if isinstance(value, Mapping):
            return super().as_mapping(value)
        return {"blocks": True} if value == "blocks" else {}


def precision_name(value: object) -> str:
    """The library's name of a precision, such as ``"bf16-mixed"`` for ``"bf16"``.

    Raises:
        ValueError: an unknown name; the message gives the nearest one.
    """
    name = PRECISIONS.get(str(value).lower())
    if name is None:
        raise unknown_word("precision", value, PRECISIONS, ", ".join(PRECISIONS))
    return name


def _as_flag(value: Any) -> Any:
    """Convert 1 and 0, which environment variables use for flags, to bools; any other value is returned unchanged."""
    return bool(value) if type(value) is int and value in (0, 1) else value


def _duration(name: str, value: int | float | str | timedelta | Duration | None) -> Duration | None:
    """The duration of a value; an error starts with the setting's name."""
    try:
        return parse(value)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}={value!r}: {error}") from None
