"""Read a checkpoint's tensors by name, whole or only this rank's shards, directly into existing memory.

A checkpoint may have weights besides the trained ones, in its folder ``weights``::

    weights/rank=00000.safetensors      what this rank wrote; a tensor is called <name of the weights>/<name in the model>
    weights/weights.json                {<name of the weights>: {"aliases": names in the model that share a tensor}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.files import DamagedCheckpoint
from engine.checkpoint.local_storage import Opened
from engine.checkpoint.manifest import OTHER_WEIGHTS, SCORED_WITH, TRAINED, WEIGHTS
from engine.checkpoint.state_forms import checked_optimizer
from engine.checkpoint.tensor_files import Stored, TensorFiles
from engine.config.hyperparameters import HParams
from engine.config.secret_text import HIDDEN
from engine.utils.checksums import checksum
from engine.utils.errors import DoesNotFit, nearest
from engine.utils.log import logger
from engine.utils.overrides import overridden
from engine.utils.text import terminal_text


@dataclass
class Report:
    """The differences between a model and a checkpoint."""

    missing: list[str] = field(default_factory=list)
    """Names that only the model has."""
    unexpected: list[str] = field(default_factory=list)
    """Names that only the checkpoint has."""
    other_shapes: list[str] = field(default_factory=list)
    """Names of tensors whose shapes differ, with both shapes."""
    other_dtypes: list[str] = field(default_factory=list)
    """Names of tensors whose dtype in the model cannot hold the checkpoint's values, with both dtypes."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.other_shapes or self.other_dtypes)

    def __str__(self) -> str:
        kinds = (
            ("missing in the checkpoint", self.missing),
            ("unexpected in it", self.unexpected),
            ("of another shape", self.other_shapes),
            ("of another type", self.other_dtypes),
        )
        parts = (
            f"{kind}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for kind, names in kinds
            if names
        )
        return terminal_text("; ".join(parts))


_TRAINED = (torch.float16, torch.bfloat16, torch.float32)


def _can_hold(dtype: torch.dtype, saved: torch.dtype) -> bool:
    """Whether a tensor of ``dtype`` may be loaded with values of dtype ``saved``: it can represent all of them, or the two differ only in
    the precision of the training."""
    if dtype == saved or (dtype in _TRAINED and saved in _TRAINED):
        return True
    same_kind = (
        dtype.is_floating_point == saved.is_floating_point
        and dtype.is_complex == saved.is_complex
        and torch.bool not in (dtype, saved)
    )
    return same_kind and dtype.itemsize > saved.itemsize and torch.promote_types(dtype, saved) == dtype


_LOAD_INTO_SAVED_MODEL = "Load it into the model that was saved, or with strict=False"
_SAVED_IN_DOUBLE = (
    "It was saved in double precision (precision='64-true'): strict=False rounds its values to the types here, as in load_from_checkpoint(path, "
    "strict=False); to keep them, run under Fit(precision='64-true'), or call torch.set_default_dtype(torch.float64) first"
)


def weights_folder(weights: str | None) -> tuple[str, ...]:
    """The folder that must be verified, besides the model's, before weights of this name are read; empty if there is none."""
    return () if weights == TRAINED else (WEIGHTS,)


class OtherWeights:
    """The weights besides the trained ones, such as moving averages, in an open checkpoint.

    They need not cover the whole model: for the rest the trained weights are used. The manifest names the weights with which the score was
    measured (``scored_with``), except in checkpoints of early versions.

    Raises:
        DamagedCheckpoint: the files do not have the form that this library writes.
    """

    def __init__(self, opened: Opened) -> None:
        self.where, self._files = opened.directory, opened.tensors(WEIGHTS)
        tree = opened.tree(OTHER_WEIGHTS, {}) or {}
        if not isinstance(tree, dict) or not all(
            isinstance(entry, dict) and isinstance(entry.get("aliases"), dict) for entry in tree.values()
        ):
            raise DamagedCheckpoint(f"{self.where}: {OTHER_WEIGHTS}.json has no aliases")
        self._tensors: dict[str, dict[str, Stored]] = {str(name): {} for name in tree}
        for key, stored in self._files.stored.items():
            name, _, parameter = key.partition("/")
            if name not in self._tensors:
                raise DamagedCheckpoint(f"{self.where}: {OTHER_WEIGHTS}.json does not name {key!r}")
            self._tensors[name][parameter] = stored
        self._scored = opened.manifest.get(SCORED_WITH, None if self._tensors else TRAINED)
        if self._scored not in (None, TRAINED, *self._tensors):
            raise DamagedCheckpoint(
                f"{self.where}: {SCORED_WITH} names the weights {self._scored!r:.80}, which the checkpoint does not have"
            )
        for name, entry in tree.items():
            for alias, original in entry["aliases"].items():
                if original not in self._tensors[str(name)]:
                    raise DamagedCheckpoint(
                        f"{self.where}: {OTHER_WEIGHTS}.json names {original!r}, which the checkpoint does not have"
                    )
                self._tensors[str(name)][str(alias)] = self._tensors[str(name)][original]

    @property
    def names(self) -> list[str]:
        """The names of the weights in the checkpoint besides the trained ones."""
        return list(self._tensors)

    def chosen(self, name: str | None) -> str:
        """Return the name of the weights to load; ``None`` means the weights with which the score was measured.

        Raises:
            ValueError: there are no weights of this name.
        """
        if name not in (None, TRAINED):
            self.named(name)
        elif name is None and self._scored is None:
            logger.warning(
                "%s also has the weights %s, and a version wrote it that did not note with which weights the score was measured: the trained ones "
                "are loaded; weights=%r loads the others",
                self.where,
                terminal_text(", ".join(map(repr, self._tensors))),
                next(iter(self._tensors)),
            )  # fmt: skip
        return name or self._scored or TRAINED

    def named(self, name: str) -> dict[str, Stored]:
        """The tensors of the weights ``name``, by their names in the model.

        Raises:
            ValueError: there are no weights of this name; the message lists the names.
        """
        if name not in self._tensors:
            available = (
                ", ".join(map(repr, [TRAINED, *self._tensors]))
                if self._tensors
                else "the trained ones only (a callback such as EMA adds others)"
            )
            raise ValueError(
                terminal_text(f"{self.where} has no weights {name!r}; it has {available}{nearest(name, self._tensors)}")
            )
        return self._tensors[name]

    def read_into(self, name: str, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of the model, whole ones or this rank's shards, from the weights ``name``.

        Raises:
            ValueError: a tensor is missing in the checkpoint, or has another shape.
        """
        stored = self.named(name)
        if missing := [key for key in targets if key not in stored]:
            raise ValueError(f"{self.where}: the weights {name!r} lack {terminal_text(', '.join(missing[:5]))}")
        _read_named(self._files, targets, {key: stored[key].name for key in targets})


def _read_named(files: TensorFiles, targets: Mapping[str, Tensor], stored: Mapping[str, str]) -> None:
    """Fill ``targets``, whose names in the files are in ``stored``. Targets with the same name in the files are read one after the other."""
    remaining = dict(targets)
    while remaining:  # one round, unless two of the model's tensors have the same tensor in the checkpoint
        batch: dict[str, Tensor] = {}
        for name in list(remaining):
            if batch.setdefault(stored[name], remaining[name]) is remaining[name]:
                del remaining[name]
        files.read_into(batch)


class Source:
    """The models and optimizers of one open checkpoint. No method is a collective.

    Args:
        weights: ``"trained"``, from which a training continues, or the name of weights to load instead, such as ``"ema"``; ``None``: the
            weights with which the checkpoint's score was measured.

    Raises:
        ValueError: there are no weights of this name.
    """

    def __init__(self, opened: Opened, weights: str | None = None) -> None:
        self.where = opened.directory
        self.others = OtherWeights(opened)
        self.weights = self.others.chosen(weights)
        """The name of the weights that are read."""
        self._replacements = {} if self.weights == TRAINED else self.others.named(self.weights)
        self._hparams = opened.manifest.get("hparams")
        self._model, self._optim = opened.tensors("model"), opened.tensors("optim")
        tree = opened.tree("model/model", {})
        if not isinstance(tree, dict) or not all(isinstance(tree.get(name), dict) for name in ("aliases", "extra")):
            raise DamagedCheckpoint(f"{self.where}: model/model.json has no aliases and extra states")
        self.aliases: dict[str, str] = tree["aliases"]
        self.extra: dict[str, Any] = tree["extra"]
        if missing := sorted(set(map(str, self.aliases.values())) - self._model.stored.keys()):
            raise DamagedCheckpoint(
                f"{self.where}: model/model.json names {missing[0]!r}, which the checkpoint does not have"
            )
        if not all(isinstance(name, str) for name in self.aliases.values()):
            raise DamagedCheckpoint(f"{self.where}: model/model.json has no usable aliases")
        self.optim: dict[str, Any] = opened.tree("optim/optim", self._optim.stored)
        """``{number: state}`` of each optimizer, by names of parameters, with :class:`Stored` for tensors."""
        if not isinstance(self.optim, dict) or set(self.optim) != {str(index) for index in range(len(self.optim))}:
            raise DamagedCheckpoint(f"{self.where}: optim/optim.json is not a list of optimizers by number")
        for number, state in self.optim.items():
            checked_optimizer(f"{self.where}: optim/optim.json, optimizer {number},", state)

    @property
    def names(self) -> list[str]:
        """The names of the model's tensors, their aliases, and its other state."""
        return [*self._model.stored, *self.aliases, *self.extra]

    def __contains__(self, name: str) -> bool:
        return name in self._model.stored or name in self.aliases or name in self.extra

    def compare(self, state: Mapping[str, Any]) -> Report:
        """Compare a model's state with the checkpoint; tensors may be on the meta device."""
        names = {*self._model.stored, *self.aliases, *self.extra}
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and name in names}
        shapes = [
            f"{n} ({list(self.stored(n).shape)} there, {list(t.shape)} here)"
            for n, t in tensors.items()
            if self.stored(n).shape != t.shape
        ]
        kinds = {name: (self.stored(name).dtype, value.dtype) for name, value in tensors.items()}
        dtypes = [
            f"{name} ({saved} there, {dtype} here)"
            for name, (saved, dtype) in kinds.items()
            if not _can_hold(dtype, saved)
        ]
        return Report(sorted(state.keys() - names), sorted(names - state.keys()), shapes, dtypes)

    def stored(self, name: str) -> Stored:
        """The description of the model's tensor of this name, in the chosen weights."""
        tensor = self._replacements.get(name) or self._model.stored.get(self.aliases.get(name, name))
        return Stored(name, torch.Size(()), torch.float32) if tensor is None else tensor

    def read_model(self, targets: Mapping[str, Tensor]) -> None:
        """Fill tensors of the model from the chosen weights."""
        if replaced := {name: targets[name] for name in targets if name in self._replacements}:
            self.others.read_into(self.weights, replaced)
        trained = {name: target for name, target in targets.items() if name not in replaced}
        _read_named(self._model, trained, {name: self.aliases.get(name, name) for name in trained})

    def check(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> Report:
        """Report how a module's ``state`` differs from the checkpoint; with ``strict``, raise :class:`engine.utils.errors.DoesNotFit` instead."""
        report = self.compare(state)
        if strict and report:
            advice = _LOAD_INTO_SAVED_MODEL
            if report.missing or report.unexpected or report.other_shapes:
                advice += self._hyperparameter_differences(module)
            elif self._differs_by_double_precision(state):
                advice = _SAVED_IN_DOUBLE
            raise DoesNotFit(f"{self.where} does not fit {type(module).__name__}: {report}. {advice}")
        return report

    def _differs_by_double_precision(self, state: Mapping[str, Any]) -> bool:
        """Whether all dtypes that do not fit are due to a checkpoint in double precision."""
        kinds = {(self.stored(name).dtype, value.dtype) for name, value in state.items() if isinstance(value, Tensor)}
        return {saved for saved, dtype in kinds if not _can_hold(dtype, saved)} <= {torch.float64, torch.complex128}

    def _hyperparameter_differences(self, module: nn.Module) -> str:
        """The hint for an error: with which other hyperparameters the saved module was created; empty if none differ."""
        hparams = getattr(module, "hparams", None)
        if not isinstance(hparams, HParams) or not isinstance(self._hparams, dict):
            return ""
        if not self._hparams:
            return "; it has no hyperparameters (save_hyperparameters): create the module with the arguments that it was trained with"
        differences = {
            str(n): v
            for n, v in self._hparams.items()
            if n not in hparams or (isinstance(v, type(hparams[n])) and v != hparams[n] and v != HIDDEN)
        }
        text = ", ".join(f"{name}={value!s:.40}" for name, value in differences.items())
        return f"; it was created with {terminal_text(text)}" if text else ""

    def load_model(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> Report:
        """Load the checkpoint into ``module``; its parameters and buffers are filled in place.

        Args:
            state: ``module.state_dict(keep_vars=True)``; tensors on the meta device belong to other ranks.
            strict: make any difference an error.

        Raises:
            ValueError: the checkpoint does not fit; the module is unchanged.
        """
        if overridden(module, "load_state_dict", nn.Module):
            return self._load_whole(module, state, strict)
        report = self.check(module, state, strict)
        misshapen = {text.split(" ")[0] for text in report.other_shapes}
        in_place_ids = {id(t) for t in (*module.parameters(), *module.buffers())}
        fits = {name: value for name, value in state.items() if name in self and name not in misshapen}
        own_tensors = {name: value for name, value in fits.items() if isinstance(value, Tensor) and not value.is_meta}
        copies = {
            name: torch.empty_like(value, requires_grad=False)
            for name, value in own_tensors.items()
            if id(value) not in in_place_ids
        }
        self.read_model({name: copies.get(name, value) for name, value in own_tensors.items()})
        entries = copies | {name: self.extra[name] for name in fits if name in self.extra}
        if entries:
            result = module.load_state_dict(entries, strict=False)
            self._fill(module, state, {name: copies[name] for name in result.unexpected_keys if name in copies})
        return report

    def _fill(self, module: nn.Module, state: Mapping[str, Any], values: Mapping[str, Tensor]) -> None:
        """Fill tensors that a module saves and does not load, such as scales of quantized weights, in place.

        Raises:
            ValueError: one of them still has another value, such as a description of a format.
        """
        with torch.no_grad():
            for name, value in values.items():
                state[name].copy_(value)
        current = own_state(module) if values else {}
        if differing := [name for name, value in values.items() if checksum(current[name]) != checksum(value)]:
            raise DoesNotFit(
                f"{self.where} has another value of {terminal_text(', '.join(differing[:3]))} than {type(module).__name__}, which saves it and "
                "cannot load it: build the model from the same weights as when it was saved"
            )

    def _load_whole(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> Report:
        """Load all of the saved state with the module's own ``load_state_dict``."""
        if any(
            isinstance(value, Tensor) and (value.is_meta or hasattr(value, "placements")) for value in state.values()
        ):
            raise ValueError(
                f"{type(module).__name__} overrides load_state_dict, which cannot be called where each rank has a part of the parameters: remove it, "
                "or use strategy='ddp'"
            )
        saved: dict[str, Any] = {name: empty_tensor(self.stored(name)) for name in (*self._model.stored, *self.aliases)}
        self.read_model(saved)
        result = module.load_state_dict({**saved, **self.extra}, strict=strict)
        missing, unexpected = ([], []) if result is None else (result.missing_keys, result.unexpected_keys)
        return Report(list(missing), list(unexpected), [], [])

    def read_optim(self, tree: Any, like: Callable[[Stored], Tensor]) -> Any:
        """Copy ``tree`` with each :class:`Stored` replaced by the tensor that ``like`` creates for it, filled from the checkpoint."""
        targets: dict[str, Tensor] = {}

        def with_tensors(value: Any) -> Any:
            if isinstance(value, Stored):
                return targets.setdefault(value.name, like(value))
            if isinstance(value, dict):
                return {key: with_tensors(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(with_tensors(item) for item in value)
            return value

        result = with_tensors(tree)
        self._optim.read_into(targets)
        return result


def empty_tensor(stored: Stored) -> Tensor:
    """An uninitialised CPU tensor with the shape and dtype of a stored tensor."""
    return torch.empty(stored.shape, dtype=stored.dtype)


def own_state(module: nn.Module) -> dict[str, Any]:
    """The module's state dict with the parameters themselves. Under FSDP this frees parameters that a forward pass has left gathered."""
    return dict(module.state_dict(keep_vars=True))
