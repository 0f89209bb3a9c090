"""Random generators of python, numpy, torch and its accelerator: seeding them, and saving and restoring their states."""

from __future__ import annotations

import operator
import random
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from engine.utils import accelerator

_MAX_SEED = 2**32 - 1  # numpy's limit


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed python's ``random``, numpy (if it is installed), and torch on the CPU and on every device of the accelerator.

    Args:
        seed: from 0 to 2**32 - 1.
        workers: has no effect, and is accepted because Lightning's function has it: a ``DataLoader`` seeds python, numpy and torch in each
            worker by itself, from torch's random numbers.

    Returns:
        The seed.

    Raises:
        TypeError: ``seed`` is not an int.
        ValueError: ``seed`` is not in [0, 2**32 - 1].
    """
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed={seed!r} is of type {type(seed).__name__}: give an int from 0 to {_MAX_SEED}")
    seed = operator.index(seed)
    if not 0 <= seed <= _MAX_SEED:
        raise ValueError(f"seed={seed} is not possible: give an int from 0 to {_MAX_SEED}")
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def capture() -> dict[str, Any]:
    """The states of all random generators that this process uses, as JSON values and tensors; see :func:`restore`.

    Numpy's state is included if numpy was imported, the accelerator's (that of the current device) if it is in use; neither is loaded
    for this. This does not wait for a device, because generators keep their states on the host.
    """
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {
            "version": version,
            "numbers": torch.frombuffer(array("q", numbers), dtype=torch.int64),
            "gauss": gauss,
        },
        "torch": torch.get_rng_state(),
    }
    if numpy := sys.modules.get("numpy"):
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        keys = torch.from_numpy(keys.astype("int64"))
        state["numpy"] = {
            "kind": kind,
            "keys": keys,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    if (kind := accelerator.in_use()) is not None:
        state["device"] = {"type": kind, "state": accelerator.module(kind).get_rng_state()}
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore a state from :func:`capture`. Generators that ``state`` does not contain are not changed, nor is the device's on a device of
    another type, whose generator works in another way.

    Raises:
        ValueError: ``state`` does not have the form of :func:`capture`'s result.
    """
    try:
        python = state["python"]
        random.setstate((python["version"], tuple(python["numbers"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"].cpu())
        if "numpy" in state:
            import numpy

            saved = state["numpy"]
            keys = saved["keys"].numpy().astype("uint32")
            numpy.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
        # Older checkpoints know CUDA only, under its own key.
        on_device = state.get("device") or ({"type": "cuda", "state": state["cuda"]} if "cuda" in state else None)
        if on_device is not None and on_device["type"] == accelerator.present():
            accelerator.module(on_device["type"]).set_rng_state(on_device["state"].cpu())
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"not a state of random generators: {type(error).__name__}: {error}; give what capture() returned"
        ) from error


States = tuple[Any, ...]
"""The states of all random generators that this process uses, unconverted; see :func:`states`."""


def states() -> States:
    """The states of all random generators that this process uses, unconverted, unlike in :func:`capture`; see :func:`set_states`."""
    numpy, kind = sys.modules.get("numpy"), accelerator.in_use()
    return (
        random.getstate(),
        torch.get_rng_state(),
        numpy.random.get_state() if numpy else None,
        accelerator.module(kind).get_rng_state() if kind is not None else None,
    )


def set_states(saved: States) -> None:
    """Restore what :func:`states` returned. Generators that were not in use then are not changed."""
    python, host, numpy_state, device = saved
    random.setstate(python)
    torch.set_rng_state(host)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)
    if device is not None and (kind := accelerator.in_use()) is not None:
        accelerator.module(kind).set_rng_state(device)


def are_equal(before: States, after: States) -> bool:
    """Whether two results of :func:`states` are equal: nothing was drawn in between."""
    return _comparable(before) == _comparable(after)


def _comparable(saved: States) -> list[Any]:
    python, host, numpy_state, device = saved
    numpy_values = None if numpy_state is None else [v.tolist() if hasattr(v, "tolist") else v for v in numpy_state]
    return [python, host.tolist(), numpy_values, None if device is None else device.tolist()]


def reseed(seed: int) -> None:
    """Seed all random generators that this process uses, as :func:`seed_everything` does, which also reaches those that are not in use (0.2 ms)."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if (kind := accelerator.in_use()) is not None:
        accelerator.module(kind).manual_seed(seed)


@contextmanager
def isolated() -> Iterator[None]:
    """Restore all random generators after the block, as if it had used none."""
    saved = states()
    try:
        yield
    finally:
        set_states(saved)
