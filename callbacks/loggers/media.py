"""Images, sounds, histograms and tables in the forms that trackers take, from those in which users have them."""

from __future__ import annotations

import io
import math
import struct
import wave
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

ENDINGS = {"image": ".png", "figure": ".png", "audio": ".wav", "text": ".txt"}
"""How the names of files with media end."""


def pixels(value: Any, dataformats: str | None = None) -> np.ndarray[Any, Any]:
    """An image as bytes, shape [H, W, C] with 1, 3 or 4 channels.

    Args:
        value: a tensor or array of whole numbers from 0 to 255 or of floats from 0 to 1, a PIL image, or a matplotlib figure.
        dataformats: ``"CHW"``, ``"HWC"`` or ``"HW"``, and ``"NCHW"`` or ``"NHWC"`` for several images, which are put side by side; ``None``: by
            the shape (torch's order, if both are possible).

    Raises:
        TypeError, ValueError: it is not an image.
    """
    if hasattr(value, "savefig"):
        value, dataformats = _drawn(value), "HWC"
    found = (
        value.detach().float().numpy() if isinstance(value, Tensor) and value.is_floating_point() else np.asarray(value)
    )
    if found.dtype.kind not in "uifb":
        raise TypeError(f"{type(value).__name__} is not an image: give a tensor, an array, a PIL image or a figure")
    form = _form(found.shape, dataformats)
    found = found.transpose([form.index(each) for each in "NHWC" if each in form])
    if "C" not in form:
        found = found[..., None]
    if "N" in form:
        found = np.concatenate(list(found), axis=1)
    if found.dtype.kind == "f":
        found = np.nan_to_num(found).clip(0.0, 1.0) * 255.0 + 0.5
    elif found.dtype.kind == "b":
        found = found * 255
    else:
        found = found.clip(0, 255)
    return np.ascontiguousarray(found.astype(np.uint8))


def png(image: np.ndarray[Any, Any]) -> bytes:
    """``image`` of :func:`pixels` as a file. Source: the PNG specification, W3C."""
    height, width, channels = image.shape
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b"")
    parts = [struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def samples(value: Any) -> np.ndarray[Any, Any]:
    """A sound as floats from -1 to 1, shape [frames, channels], from a tensor or array of shape [frames], [frames, C] or [C, frames]."""
    found = numbers(value)
    if found.ndim == 1:
        found = found[:, None]
    if found.ndim != 2 or not found.size:
        raise ValueError(f"a sound has the shape [frames] or [channels, frames], not {list(found.shape)}")
    return found.T if found.shape[0] < found.shape[1] else found


def wav(value: Any, sample_rate: int = 44100) -> bytes:
    """A sound (:func:`samples`) as a file of 16 bit samples; ``sample_rate`` in Hz."""
    sound = samples(value)
    data = (sound.clip(-1.0, 1.0) * 32767.0).round().astype("<i2")
    with io.BytesIO() as file:
        with wave.open(file, "wb") as writer:
            writer.setparams((sound.shape[1], 2, int(sample_rate), len(sound), "NONE", ""))
            writer.writeframes(data.tobytes())
        return file.getvalue()


def numbers(value: Any) -> np.ndarray[Any, Any]:
    """A tensor, an array or a list of numbers as an array of floats.

    Raises:
        TypeError: it is something else.
    """
    found = value.detach().double().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if found.dtype.kind not in "uifb":
        raise TypeError(f"{type(value).__name__} is not a tensor or an array of numbers")
    return found.astype(np.float64)


def histogram(value: Any, bins: int | Sequence[float] = 64) -> tuple[list[int], list[float]]:
    """Counts, and edges (one more), of the finite numbers in ``value``."""
    found = numbers(value).ravel()
    counts, edges = np.histogram(found[np.isfinite(found)], bins=bins)
    return counts.tolist(), edges.tolist()


def table(value: Any, columns: Sequence[str] | None = None) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table: a data frame, a dict of columns, a list of dicts, or a list of rows with ``columns``.

    Raises:
        TypeError, ValueError: it is not a table, or columns differ in length.
    """
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        value = value.to_dict(orient="list")
    if isinstance(value, Mapping):
        names = [str(name) for name in value]
        return names, [[_cell(each) for each in row] for row in zip(*value.values(), strict=True)]
    rows = value.tolist() if isinstance(value, (Tensor, np.ndarray)) else list(value)
    if rows and all(isinstance(row, Mapping) for row in rows):
        names = list(dict.fromkeys(str(name) for row in rows for name in row))
        return names, [[_cell(row.get(name)) for name in names] for row in rows]
    width = len(rows[0]) if rows else len(columns or ())
    names = [str(n) for n in columns] if columns is not None else [str(i) for i in range(width)]
    if any(len(row) != len(names) for row in rows):
        raise ValueError(f"the table has {len(names)} columns, {names}, and a row of another length")
    return names, [[_cell(each) for each in row] for row in rows]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as text."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def content(kind: str, value: Any, options: Mapping[str, Any]) -> bytes:
    """An image, figure, sound or text as the content of a file (:data:`ENDINGS`)."""
    if kind in ("image", "figure"):
        return png(pixels(value, options.get("dataformats")))
    return wav(value, options.get("sample_rate", 44100)) if kind == "audio" else str(value).encode()


def jsonable(value: float) -> float | str:
    """A number as JSON, which has no NaN and infinity: these become text that ``float`` reads."""
    return value if math.isfinite(value) else str(float(value))


def file_name(name: str, step: int, number: int, ending: str) -> Path:
    """A relative path for the ``number``-th medium called ``name`` at ``step``."""
    parts = [
        part for part in "".join(c if c.isalnum() or c in "-_./" else "_" for c in name).split("/") if part.strip(".")
    ]
    return Path(*parts[:-1], f"{(parts or ['medium'])[-1]}-step={step:08d}{f'-{number}' if number else ''}{ending}")


def _form(shape: Sequence[int], given: str | None) -> str:
    if given is None:
        last = len(shape) > 2 and shape[-1] in (1, 3, 4) and shape[-3] not in (1, 3, 4)
        given = {2: "HW", 3: "HWC" if last else "CHW", 4: "NHWC" if last else "NCHW"}.get(len(shape), "")
    given = given.upper()
    possible = given in ("HW", "CHW", "HWC", "NCHW", "NHWC") and len(given) == len(shape) and 0 not in shape
    if not possible or ("C" in given and shape[given.index("C")] not in (1, 3, 4)):
        raise ValueError(
            f"an image has the shape [C, H, W], [H, W, C] or [H, W] with 1, 3 or 4 channels, not {list(shape)} (dataformats={given or None!r})"
        )
    return given


def _drawn(figure: Any) -> Any:
    """A matplotlib figure's pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def _cell(value: Any) -> Any:
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, float):
        return jsonable(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
