"""Names of all other trainers, and what is used here instead: the tables of each trainer as one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.compat.accelerate import names as accelerate
from engine.compat.lightning import arguments as lightning
from engine.compat.lightning.names import ATTRIBUTES as LIGHTNING
from engine.compat.transformers import arguments as transformers

_SETTINGS = {
    **dict.fromkeys(("num_gpus", "nproc_per_node"), "devices"),
    "nnodes": "num_nodes",
    "dtype": "precision",
    "grad_accum_steps": "accumulate_grad_batches",
    "clip_grad_norm": "gradient_clip_val",
    **dict.fromkeys(("num_epochs", "epochs"), "max_epochs"),
    "num_steps": "max_steps",
    "recompute": "activation_checkpointing",
    "detect_nan": "on_nonfinite",
    "float32_matmul_precision": "matmul_precision",
}
"""Words of launchers and scripts that belong to no single trainer."""


def _merged(tables: Iterable[Mapping[str, Mapping[str, str]]]) -> dict[str, dict[str, str]]:
    """One table with the rows of all ``tables``, by place."""
    merged: dict[str, dict[str, str]] = {}
    for table in tables:
        for place, rows in table.items():
            merged.setdefault(place, {}).update(rows)
    return merged


NAMES = _SETTINGS | lightning.SETTINGS | accelerate.SETTINGS | transformers.SETTINGS
"""Settings by the names that others have for them."""
OTHERWISE = {
    "allow_tf32": transformers.OTHERWISE["tf32"],
    **lightning.OTHERWISE,
    **accelerate.OTHERWISE,
    **transformers.OTHERWISE,
}
"""Arguments that are no setting -> what to do instead."""
ARGUMENTS = _merged((lightning.CALLS, accelerate.CALLS))
"""Arguments of other trainers, by our call: what to do instead."""
ATTRIBUTES = _merged((LIGHTNING, accelerate.ATTRIBUTES))
"""Attributes of other trainers' objects, by our class: what to use instead."""
