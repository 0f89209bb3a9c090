"""``Trainer``'s ``plugins``: what reads checkpoint files that are not this library's."""

from __future__ import annotations

import itertools
from typing import Any

from engine.utils.extensions import hint


class CheckpointIO:
    """A plugin of ``Trainer(plugins=[...])`` that reads checkpoints in a format of its own. This library writes one format only, so there is
    nothing else to define."""

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The file at ``path``, as Lightning's files are: ``state_dict``, ``hyper_parameters``, ..."""
        import torch  # here, because ``fit migrate`` checks Trainer's arguments without it

        content: dict[str, Any] = torch.load(path, map_location=map_location, weights_only=weights_only is not False)
        return content


def reader(plugins: Any) -> CheckpointIO | None:
    """The :class:`CheckpointIO` among ``Trainer``'s plugins; ``None`` if there is none.

    Raises:
        ValueError: a plugin of another kind, or one that would write.
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
