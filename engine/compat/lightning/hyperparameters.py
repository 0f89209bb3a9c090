"""``HyperparametersMixin`` for classes that are no modules, and the functions for ``hparams.yaml``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from engine.config.hyperparameters import HParams, initial, save, saved_by
from engine.utils.log import logger as log


class HyperparametersMixin:
    """Gives any class ``save_hyperparameters`` and ``hparams``, as :class:`engine.TrainModule` has them."""

    hparams_name: str | None = None

    def save_hyperparameters(
        self, *args: Any, ignore: str | Iterable[str] | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Save the arguments of ``__init__`` in ``hparams``; see :meth:`engine.TrainModule.save_hyperparameters`."""
        current = inspect.currentframe()
        save(self, args, ignore, logger, frame or (current.f_back if current else None))

    def _set_hparams(self, hp: Any) -> None:
        """Add the entries of ``hp`` to ``hparams``. Packages call this method of Lightning, although it is private."""
        name = self.hparams_name
        save(self, (hp,), None, True, None)
        self.hparams_name = name

    @property
    def hparams(self) -> HParams:
        """The hyperparameters by name; also accessible as attributes."""
        return saved_by(self)

    @property
    def hparams_initial(self) -> HParams:
        """A copy of ``hparams`` as of the latest call of ``save_hyperparameters``."""
        return initial(self)


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> dict[str, Any]:
    """Read hyperparameters from a file. Plain values only: a tag that would make an object is an error, and ``use_omegaconf`` has no effect.

    A file that does not exist gives ``{}``, with a warning.
    """
    path = Path(config_yaml)
    if not path.exists():
        log.warning("load_hparams_from_yaml: %s does not exist, so there are no hyperparameters", path)
        return {}
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})


def save_hparams_to_yaml(config_yaml: str | Path, hparams: Any, use_omegaconf: bool = True) -> None:
    """Write hyperparameters, a dict or a ``Namespace``, into a file. A value that YAML cannot hold without code is left out, with a warning."""
    path = Path(config_yaml)
    if not path.parent.is_dir():
        raise RuntimeError(f"save_hparams_to_yaml: there is no folder {path.parent}: create it")
    values = dict(hparams if isinstance(hparams, dict) else vars(hparams))
    for name, value in list(values.items()):
        try:
            yaml.safe_dump(value)
        except yaml.YAMLError:
            log.warning("save_hparams_to_yaml: %r is left out: %s is not a plain value", name, type(value).__name__)
            del values[name]
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
