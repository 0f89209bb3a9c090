"""Random numbers of python, numpy, torch and its accelerator: seeding, and saving and restoring of their states."""

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

_MOST = 2**32 - 1  # numpy's limit


def seed_everything(seed: int, workers: bool = True) -> int:
    """Seed python's ``random``, numpy (when it is installed), torch on the CPU and on every device of the accelerator.

    Args:
        seed: from 0 to 2**32 - 1.
        workers: of no effect, for callers who know it from Lightning: a ``DataLoader`` seeds python, numpy and torch of each worker by itself,
            from torch's random numbers.

    Returns:
        The seed.

    Raises:
        TypeError: ``seed`` is not an int.
        ValueError: it is not in [0, 2**32 - 1].
    """
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed={seed!r} is of type {type(seed).__name__}: give an int from 0 to {_MOST}")
    seed = operator.index(seed)
    if not 0 <= seed <= _MOST:
        raise ValueError(f"seed={seed} is not possible: give an int from 0 to {_MOST}")
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
    """The state of every generator that this process uses, as JSON values and tensors; see :func:`restore`.

    Numpy's is included if numpy was imported, the accelerator's (of the current device) if it is in use: neither is loaded
    for this. This does not wait for a device: generators keep their states on the host.
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
    """Restore a state from :func:`capture`. A generator that ``state`` lacks is not changed, nor is the device's on a device of another
    type, whose generator counts differently.

    Raises:
        ValueError: ``state`` is not of :func:`capture`'s form.
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


@contextmanager
def isolated() -> Iterator[None]:
    """Restore all random numbers after the block, as if it had used none. The generators' own states are kept: :func:`capture` converts them."""
    numpy, kind = sys.modules.get("numpy"), accelerator.in_use()
    python, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = numpy.random.get_state() if numpy else None
    device_state = accelerator.module(kind).get_rng_state() if kind is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(torch_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        if kind is not None:
            accelerator.module(kind).set_rng_state(device_state)
