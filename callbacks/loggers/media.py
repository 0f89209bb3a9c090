"""Conversions of images, texts and other media that modules log (:meth:`engine.Callback.on_media`) into the forms that trackers take."""

from __future__ import annotations

import io
import math
import struct
import wave
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

ENDINGS = {"image": ".png", "figure": ".png", "audio": ".wav", "text": ".txt"}
"""Kinds of media that are files -> the suffix of the file."""


def pixels(value: Any) -> Array:
    """An image or a figure as an array of bytes, shape [H, W, C] with 1, 3 or 4 channels; several images are put side by side."""
    if not isinstance(value, Tensor):
        return _figure_pixels(value)
    image = numbers(value)
    if image.ndim == 2:
        image = image[None]
    if image.ndim == 4:
        image = np.concatenate(list(image), axis=2)
    if value.is_floating_point():
        image = np.nan_to_num(image).clip(0.0, 1.0) * 255.0 + 0.5
    elif value.dtype == torch.bool:
        image = image * 255
    return np.ascontiguousarray(image.astype(np.uint8).transpose(1, 2, 0))


def png(image: Array) -> bytes:
    """The content of a PNG file with an ``image`` of :func:`pixels`. Source: the PNG specification, W3C."""
    height, width, channels = image.shape
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b"")
    parts = [struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def sound(value: Tensor) -> Array:
    """A sound as floats from -1 to 1, shape [samples, channels]."""
    samples = numbers(value).clip(-1.0, 1.0)
    return samples[:, None] if samples.ndim == 1 else samples.T


def wav(value: Tensor, sample_rate: int) -> bytes:
    """The content of a WAV file of 16-bit samples; ``sample_rate`` in Hz."""
    samples = sound(value)
    with io.BytesIO() as file:
        with wave.open(file, "wb") as writer:
            writer.setparams((samples.shape[1], 2, int(sample_rate), len(samples), "NONE", ""))
            writer.writeframes((samples * 32767.0).round().astype("<i2").tobytes())
        return file.getvalue()


def numbers(value: Tensor) -> Array:
    """A tensor as an array of floats; waits for the device."""
    array: Array = value.detach().cpu().double().numpy()
    return array


def finite(value: Tensor) -> Array:
    """The finite numbers in a tensor.

    Raises:
        ValueError: the tensor has no finite numbers.
    """
    array = numbers(value).ravel()
    array = array[np.isfinite(array)]
    if not array.size:
        raise ValueError("it has no finite number")
    return array


def histogram(value: Tensor, bins: int = 64) -> tuple[list[int], list[float]]:
    """Counts, and edges (one more), of the finite numbers in ``value``."""
    counts, edges = np.histogram(finite(value), bins=bins)
    return counts.tolist(), edges.tolist()


def cells(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Rows of a table as JSON values; what JSON cannot express becomes text."""
    return [[_cell(cell) for cell in row] for row in rows]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as Markdown."""
    lines = [columns, ["---"] * len(columns), *cells(rows)]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def content(kind: str, value: Any, sample_rate: int = 44100) -> bytes:
    """The content of the file of an image, figure, sound or text (:data:`ENDINGS`)."""
    if kind in ("image", "figure"):
        return png(pixels(value))
    return wav(value, sample_rate) if kind == "audio" else str(value).encode()


def jsonable(value: float) -> float | str:
    """A number for JSON, which has no NaN and infinity: both become text that ``float`` reads."""
    return value if math.isfinite(value) else str(float(value))


def file_name(name: str, step: int, ending: str, number: int = 0) -> Path:
    """A relative path for the ``number``-th medium called ``name`` at ``step``."""
    allowed = "".join(c if c.isalnum() or c in "-_./" else "_" for c in name)
    *folders, last = [part for part in allowed.split("/") if part.strip(".")] or ["medium"]
    return Path(*folders, f"{last}-step={step:08d}{f'-{number}' if number else ''}{ending}")


def _figure_pixels(figure: Any) -> Array:
    """A figure's pixels, as matplotlib draws them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(getattr(figure, "figure", figure))
    canvas.draw()
    return np.array(canvas.buffer_rgba())


def _cell(value: Any) -> Any:
    if isinstance(value, Tensor) or type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, float):
        return jsonable(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
