"""A checkpoint's state besides parameters and optimizers: one form for ``Fit`` and ``Engine``, and reading of earlier forms.

``state/shared`` of both, the same on all ranks:

    seed, schedulers, scaler, window, registered
    loaders                             {"epoch", "position"[, "order"]} of each; a run has only its training loader

``state/rank=...`` of both:

    place                               number of ranks with different data, this rank's index, and whether it saves for its data
    rng
    streams                             state of each loader besides its position

A run adds callbacks, metrics and its counters (``state``, ``callbacks``, ...; see :mod:`engine.loop.run_snapshot`).
"""

from __future__ import annotations

from typing import Any


def shared_form(tree: Any) -> Any:
    """A ``state/shared`` tree of any version in the current form."""
    if not isinstance(tree, dict) or "loaders" in tree or not isinstance(tree.get("state"), dict):
        return tree
    # A run of an earlier version, or a checkpoint that was converted.
    state, order = tree["state"], tree.get("order")
    over = bool(state.get("epoch_done"))
    loader = {"epoch": state.get("epoch", 0) + over, "position": 0 if over else state.get("position", 0)}
    return {"window": None, **tree, "loaders": [loader if order is None else {**loader, "order": order}]}


def own_form(tree: Any) -> Any:
    """A rank's tree of any version in the current form."""
    if not isinstance(tree, dict):
        return tree
    found = {"streams": [tree["stream"]], **tree} if "stream" in tree else tree
    place = found.get("place")
    return {**found, "place": [*place, 1]} if isinstance(place, list) and len(place) == 2 else found
