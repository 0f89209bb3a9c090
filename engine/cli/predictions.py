"""Writes predictions to files that contain no code: safetensors, or one line of JSON per sample."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.tensor_files import serialize_tensors
from engine.cli.terminal import UsageError
from engine.utils.errors import nearest
from engine.utils.hard_links import separate
from engine.utils.paths import expanded

ENDINGS = (".safetensors", ".jsonl")


def check_output(output: str | None) -> None:
    """Check, before the run, that predictions can be written to ``output``.

    Raises:
        UsageError: the suffix is another one, or the directory does not exist.
    """
    if output is None:
        return
    path = Path(expanded(output))
    if path.suffix not in ENDINGS:
        hint = nearest(path.suffix, ENDINGS)
        raise UsageError(f"--output {output}: the suffix must be {' or '.join(ENDINGS)}{hint}")
    if not path.parent.is_dir():
        raise UsageError(f"--output {output}: there is no directory {str(path.parent)!r}")


def write(predictions: list[Any], several: bool, output: str | None) -> dict[str, Any]:
    """Write the result of ``Fit.predict``: a list with an entry per batch; with ``several`` loaders one such list per loader.

    ``.safetensors`` has a tensor for each path in a prediction, with all samples joined: ``"predictions"``, or ``"logits"`` for ``{"logits": ...}``,
    ``"0"`` for the first of a tuple; with several loaders prefixed by the loader's number, ``"1.logits"``. ``.jsonl`` has one line per sample,
    with several loaders ``{"loader": 1, "prediction": ...}``; numbers that are not finite are ``null``.

    Returns:
        The number of ``samples``, and the ``output``; without an output, the dtype and shape of each tensor instead.

    Raises:
        ValueError: ``.safetensors`` is asked for predictions that are not tensors, or whose shapes differ beyond the first dimension.
    """
    loaders = predictions if several else [predictions]
    if output is not None and output.endswith(".jsonl"):
        numbered_rows = (
            (index, row) for index, batches in enumerate(loaders) for batch in batches for row in _rows_of_batch(batch)
        )
        rows = [{"loader": index, "prediction": row} if several else row for index, row in numbered_rows]
        separate(expanded(output))
        with _naming_file(output), Path(expanded(output)).open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
        return {"samples": len(rows), "output": output}
    tensors: dict[str, Tensor] = {}
    samples = 0
    for index, batches in enumerate(loaders):
        joined = _joined(batches)
        samples += max((len(tensor) for tensor in joined.values()), default=0)
        tensors.update(
            {
                ".".join(([str(index)] if several else []) + list(path)) or "predictions": tensor
                for path, tensor in joined.items()
            }
        )
    if output is None:
        return {
            "samples": samples,
            **{name: f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors.items()},
        }
    parts = serialize_tensors(tensors, {"format": "pt"})
    head = next(parts)  # raises for what cannot be written, before the file is opened
    separate(expanded(output))
    with _naming_file(output), Path(expanded(output)).open("wb") as file:
        file.write(head)
        file.writelines(parts)
    return {"samples": samples, "output": output}


@contextmanager
def _naming_file(output: str) -> Iterator[None]:
    """Add the file's name to errors inside the block that lack it, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or output
        raise


def _joined(batches: Sequence[Any]) -> dict[tuple[str, ...], Tensor]:
    """The predictions of all batches as tensors, joined along their first dimension, by their path inside a batch's prediction."""
    parts: dict[tuple[str, ...], list[Tensor]] = {}
    for batch in batches:
        for path, leaf in _leaves(batch, ()):
            if not isinstance(leaf, (Tensor, bool, int, float)):
                kind = type(leaf).__name__
                raise ValueError(
                    f"predictions hold {leaf!r:.60} of type {kind}, which is not a tensor: use --output FILE.jsonl"
                )
            tensor = leaf if isinstance(leaf, Tensor) else torch.tensor(leaf)
            parts.setdefault(path, []).append(tensor if tensor.ndim else tensor.reshape(1))
    for path, tensors in parts.items():
        shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
        if len(shapes) > 1:
            first, second, *_ = (["n", *shape] for shape in sorted(shapes))
            raise ValueError(
                f"predictions{''.join(f'[{key!r}]' for key in path)} have the shapes {first} and {second}, which cannot be joined: "
                "write them with --output FILE.jsonl"
            )
    return {path: torch.cat(tensors) for path, tensors in parts.items()}


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values inside dicts, lists and tuples, each with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, str(index)))
    elif value is not None:
        yield path, value


def _rows_of_batch(batch: Any) -> list[Any]:
    """Split a batch's prediction into one JSON value per sample; if it cannot be split, it is one row."""
    if isinstance(batch, Tensor):
        return list(_as_json(batch)) if batch.ndim else [_as_json(batch)]
    items = (
        list(batch.values()) if isinstance(batch, Mapping) else list(batch) if isinstance(batch, (list, tuple)) else []
    )
    if items and not isinstance(batch, Mapping) and not any(isinstance(item, Tensor) for item in items):
        return [_as_json(item) for item in items]
    lengths = {
        len(item) if isinstance(item, (list, tuple)) or (isinstance(item, Tensor) and item.ndim) else -1
        for item in items
    }
    if len(lengths) != 1 or -1 in lengths:
        return [_as_json(batch)]
    columns = [_as_json(item) for item in items]
    if isinstance(batch, Mapping):
        return [dict(zip(map(str, batch), row, strict=True)) for row in zip(*columns, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _as_json(value: Any) -> Any:
    """A value as JSON has it: numbers that are not finite become ``null``, and other objects text."""
    if isinstance(value, Tensor):
        return _as_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
