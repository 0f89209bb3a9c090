"""A checkpoint as strategies read it: by names, whole tensors or this rank's parts, straight into memory that is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.store import Opened
from engine.checkpoint.tensors import Stored


@dataclass
class Report:
    """What of a model and of a checkpoint did not find each other."""

    missing: list[str] = field(default_factory=list)
    """In the model only."""
    unexpected: list[str] = field(default_factory=list)
    """In the checkpoint only."""
    other_shapes: list[str] = field(default_factory=list)
    """In both, with different shapes."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.other_shapes)

    def __str__(self) -> str:
        kinds = (("missing in the checkpoint", self.missing), ("unexpected in it", self.unexpected), ("of another shape", self.other_shapes))
        return "; ".join(f"{kind}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}" for kind, names in kinds if names)


class Source:
    """What one open checkpoint holds of models and optimizers. Every rank reads for itself."""

    def __init__(self, opened: Opened) -> None:
        self.where = opened.directory
        self._model, self._optim = opened.tensors("model"), opened.tensors("optim")
        tree = opened.tree("model/model", {})
        if not isinstance(tree, dict) or not all(isinstance(tree.get(name), dict) for name in ("aliases", "extra")):
            raise DamagedCheckpoint(f"{self.where}: model/model.json has no aliases and extra states")
        self.aliases: dict[str, str] = tree["aliases"]
        self.extra: dict[str, Any] = tree["extra"]
        if lost := sorted(set(self.aliases.values()) - self._model.stored.keys()):
            raise DamagedCheckpoint(f"{self.where}: model/model.json names {lost[0]!r}, which is not there")
        self.optim: dict[str, Any] = opened.tree("optim/optim", self._optim.stored)
        """``{number: state}`` of each optimizer, by names of parameters, with :class:`Stored` for tensors."""

    def __contains__(self, name: str) -> bool:
        return name in self._model.stored or name in self.aliases or name in self.extra

    def compare(self, own: Mapping[str, Any]) -> Report:
        """How a model's state fits; tensors may be on the meta device."""
        there = {*self._model.stored, *self.aliases, *self.extra}
        tensors = {name: value for name, value in own.items() if isinstance(value, Tensor) and name in there}
        shapes = [f"{n} ({list(self.stored(n).shape)} there, {list(t.shape)} here)" for n, t in tensors.items() if self.stored(n).shape != t.shape]
        return Report(sorted(own.keys() - there), sorted(there - own.keys()), shapes)

    def stored(self, name: str) -> Stored:
        """The model's tensor of that name."""
        found = self._model.stored.get(self.aliases.get(name, name))
        return Stored(name, torch.Size(()), torch.float32) if found is None else found

    def read_model(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of the model."""
        rest = dict(targets)
        while rest:  # once, but where the model has two tensors for one of the checkpoint
            now: dict[str, Tensor] = {}
            for name in list(rest):
                if now.setdefault(self.aliases.get(name, name), rest[name]) is rest[name]:
                    del rest[name]
            self._model.read_into(now)

    def check(self, module: nn.Module, own: Mapping[str, Any], strict: bool) -> Report:
        """How ``own`` fits; with ``strict``, not at all is a ``ValueError`` that names what does not."""
        report = self.compare(own)
        if strict and report:
            raise ValueError(
                f"{self.where} does not fit {type(module).__name__}: {report}. Load it into the model that was saved, or with strict=False"
            )
        return report

    def load_model(self, module: nn.Module, own: Mapping[str, Any], strict: bool) -> Report:
        """Fill parameters and buffers of ``module`` in place.

        Args:
            own: ``module.state_dict(keep_vars=True)``; tensors on the meta device are other ranks'.
            strict: anything that does not fit is an error.

        Raises:
            ValueError: it does not fit; nothing has been read.
        """
        report = self.check(module, own, strict)
        wrong = {text.split(" ")[0] for text in report.other_shapes}
        direct = {id(t) for t in (*module.parameters(), *module.buffers())}
        fits = {name: value for name, value in own.items() if name in self and name not in wrong}
        here = {name: value for name, value in fits.items() if isinstance(value, Tensor) and not value.is_meta}
        made = {name: torch.empty_like(value, requires_grad=False) for name, value in here.items() if id(value) not in direct}
        self.read_model({name: made.get(name, value) for name, value in here.items()})
        rest = made | {name: self.extra[name] for name in fits if name in self.extra}
        if rest:
            module.load_state_dict(rest, strict=False)
        return report

    def read_optim(self, tree: Any, like: Callable[[Stored], Tensor]) -> Any:
        """``tree`` with each :class:`Stored` in it read into what ``like`` gives for it."""
        targets: dict[str, Tensor] = {}

        def place(value: Any) -> Any:
            if isinstance(value, Stored):
                return targets.setdefault(value.name, like(value))
            if isinstance(value, dict):
                return {key: place(each) for key, each in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(place(each) for each in value)
            return value

        found = place(tree)
        self._optim.read_into(targets)
        return found


def whole(stored: Stored) -> Tensor:
    """An empty tensor for all of it, on the CPU."""
    return torch.empty(stored.shape, dtype=stored.dtype)


def own_state(module: nn.Module) -> dict[str, Any]:
    """The module's state with its parameters themselves; under FSDP, whatever was still gathered from a forward pass is freed by it."""
    return dict(module.state_dict(keep_vars=True))
