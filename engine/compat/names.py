"""Names of other trainers and what to use instead: the tables of all trainers, merged."""

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
"""Names that are common in launchers and scripts, but belong to no single trainer -> our setting."""


def _merged(tables: Iterable[Mapping[str, Mapping[str, str]]]) -> dict[str, dict[str, str]]:
    """Merge ``tables`` into one; the rows of the same place are combined."""
    merged: dict[str, dict[str, str]] = {}
    for table in tables:
        for place, rows in table.items():
            merged.setdefault(place, {}).update(rows)
    return merged


NAMES = _SETTINGS | lightning.SETTINGS | accelerate.SETTINGS | transformers.SETTINGS
"""Other trainers' names of settings -> our names."""
OTHERWISE = {
    "allow_tf32": transformers.OTHERWISE["tf32"],
    **lightning.OTHERWISE,
    **accelerate.OTHERWISE,
    **transformers.OTHERWISE,
}
"""Arguments of other trainers without a setting -> what to do instead."""
ARGUMENTS = _merged((lightning.CALLS, accelerate.CALLS))
"""Our method -> arguments of other trainers' counterparts that it lacks -> what to do instead."""
ATTRIBUTES = _merged((LIGHTNING, accelerate.ATTRIBUTES))
"""Our class -> attributes of other trainers' counterparts that it lacks -> what to use instead."""
