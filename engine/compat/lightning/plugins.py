"""``Trainer``'s ``plugins``: readers for checkpoint files in other formats than this library's."""

from __future__ import annotations

import itertools
from typing import Any

from engine.utils.extensions import hint


class CheckpointIO:
    """A plugin of ``Trainer(plugins=[...])`` that reads checkpoints in its own format. It cannot change how checkpoints are written, because this
    library writes one format only."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file at ``path`` and return a dict in Lightning's layout: ``state_dict``, ``hyper_parameters``, ..."""
        import torch  # here, because ``fit migrate`` checks Trainer's arguments without it

        content: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=weights_only is not False)
        return content


def reader(plugins: Any) -> CheckpointIO | None:
    """The :class:`CheckpointIO` among ``Trainer``'s plugins; ``None`` if there is none.

    Raises:
        ValueError: a plugin is of another class, there are several, or one defines methods that write checkpoints.
    """
    readers = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins] if plugins else []
    unknown = [plugin for plugin in readers if not isinstance(plugin, CheckpointIO)]
    if unknown or len(readers) > 1:
        raise ValueError(f"Trainer(plugins={(unknown or readers)!r}) has no counterpart{hint('setting', 'plugins')}")
    for io, name in itertools.product(readers, ("save_checkpoint", "remove_checkpoint", "teardown")):
        if hasattr(io, name):
            raise ValueError(
                f"Trainer(plugins=[{type(io).__name__}()]): nothing calls its {name}, because checkpoints have one format; leave it out, and "
                "do what it does in a callback's on_checkpoint_saved"
            )
    return readers[0] if readers else None
