"""Checks the media that a module can log in addition to numbers: images, histograms, text, audio, figures, tables and files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.utils.errors import nearest
from engine.utils.paths import expanded
from engine.utils.tree import full_tensor


def as_medium(kind: str, name: str, value: Any, **options: Any) -> Any:
    """Check a medium that was logged, and return ``value`` in the form that callbacks get; a tensor is copied, on its device.

    ======================  =======================================================================================================
    ``image``               a tensor [height, width], [1 or 3 or 4, height, width] or several as [n, channels, height, width]; uint8, or
                            floats from 0 to 1
    ``histogram``           a tensor of any shape
    ``text``                a str
    ``audio``               a tensor [samples] or [channels, samples] of floats from -1 to 1
    ``figure``              an object with ``savefig(file, format=...)``, as matplotlib's
    ``table``               ``(columns, rows)``: the names of the columns, and lists with one value per column
    ``artifact``            a ``Path`` of an existing file or directory
    ======================  =======================================================================================================

    Raises:
        ValueError: the kind is unknown, the shape is wrong, or the file does not exist.
        TypeError: the value has another type.
    """
    if kind not in KINDS:
        raise ValueError(
            f"log_media({kind!r}): there is no such kind{nearest(kind, KINDS)}; possible: {', '.join(KINDS)}"
        )
    if not isinstance(name, str) or not name:
        raise TypeError(f"log_{kind}({name!r}): the name must be a str that is not empty")
    return KINDS[kind](f"log_{kind}({name!r})", value)


def _tensor(who: str, value: Any) -> Tensor:
    """Convert ``value`` to a real tensor, copied and whole; ``who``: the call of ``log_<kind>``, for errors."""
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(_array(value))
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{who} got {type(value).__name__}: give a tensor or an array") from error
    if value.is_complex():
        raise TypeError(f"{who} got a complex tensor: give real numbers")
    return full_tensor(value.detach()).clone()


def _array(value: Any) -> Any:
    """Convert a PIL image to an array of its pixels; return other values unchanged, for ``torch.as_tensor``."""
    if not hasattr(value, "getdata") or not hasattr(value, "mode"):
        return value
    import numpy

    pixels = numpy.array(value.convert("RGB") if value.mode not in ("L", "RGB", "RGBA") else value)
    return pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _image(who: str, value: Any) -> Tensor:
    image = _tensor(who, value)
    if image.ndim not in (2, 3, 4) or (image.ndim > 2 and image.shape[-3] not in (1, 3, 4)) or not image.numel():
        raise ValueError(
            f"{who} got shape {tuple(image.shape)}: give [height, width], [channels, height, width] or [n, channels, height, width] with "
            "1, 3 or 4 channels (of an array [height, width, channels]: permute it)"
        )
    if image.dtype not in (torch.uint8, torch.bool) and not image.is_floating_point():
        raise TypeError(f"{who} got {image.dtype}: give uint8 from 0 to 255, or floats from 0 to 1")
    return image


def _histogram(who: str, value: Any) -> Tensor:
    values = _tensor(who, value)
    if not values.numel():
        raise ValueError(f"{who} got no values: its shape is {tuple(values.shape)}")
    return values


def _text(who: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{who} got {type(value).__name__}: give a str")
    return value


def _audio(who: str, value: Any) -> Tensor:
    audio = _tensor(who, value)
    if audio.ndim not in (1, 2) or not audio.numel() or not audio.is_floating_point():
        raise ValueError(
            f"{who} got shape {tuple(audio.shape)} of {audio.dtype}: give [samples] or [channels, samples], floats from -1 to 1"
        )
    return audio


def _figure(who: str, value: Any) -> Any:
    if not callable(getattr(value, "savefig", None)):
        raise TypeError(f"{who} got {type(value).__name__}: give a figure, as matplotlib.pyplot.figure() returns it")
    return value


def _table(who: str, value: Any) -> tuple[list[str], list[list[Any]]]:
    columns, rows = value
    if isinstance(columns, str) or not isinstance(columns, Sequence) or isinstance(rows, str):
        raise TypeError(f"{who}: columns must be a list of names, and rows a list of lists")
    names, lines = [str(column) for column in columns], [list(row) for row in rows]
    for number, line in enumerate(lines):
        if len(line) != len(names):
            raise ValueError(f"{who}: row {number} has {len(line)} values for {len(names)} columns")
    return names, lines


def _artifact(who: str, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{who} got {type(value).__name__}: give the path of a file or a directory")
    path = Path(expanded(value))
    if not path.exists():
        raise ValueError(f"{who}: {path} does not exist")
    return path


KINDS: dict[str, Callable[[str, Any], Any]] = {
    "image": _image,
    "histogram": _histogram,
    "text": _text,
    "audio": _audio,
    "figure": _figure,
    "table": _table,
    "artifact": _artifact,
}
"""By kind, the function that checks and converts a value."""
