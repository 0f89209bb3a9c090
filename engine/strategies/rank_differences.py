"""Hyperparameters, ``requires_grad`` and edits of parameters that differ between the ranks of a training, found without a collective of their own."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.distributed.agreement import Compared
from engine.distributed.collectives import gather_json
from engine.distributed.comparison import MAX_LISTED, check_alike, check_equal, comparable, fingerprint
from engine.distributed.group import Group
from engine.strategies.base import Strategy
from engine.strategies.ddp import DDP
from engine.strategies.model_structure import TrainedParameters
from engine.transforms.blocks import user_module
from engine.utils import accelerator
from engine.utils.checksums import sum_of_bits
from engine.utils.log import logger
from engine.utils.parameters import is_sharded

_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")
MAX_FALSE_ALARMS = 3
"""How often the ranks compare parameters that some of them have changed alone, without finding a difference, until they stop looking for edits."""


def compare_forms(group: Group, strategy: Strategy, model: nn.Module) -> None:
    """Compare names, dtypes and shapes of a model's parameters over the ranks, which are trained, and the settings of torch's own layers (the
    probability of a ``Dropout``, say), by one small collective.

    Under a pipeline, where ranks may have parts, nothing is compared.

    Raises:
        CheckError: ranks differ; raised on all ranks, with the differences.
    """
    if group.world_size == 1 or strategy.pipelined:
        return
    module = user_module(model)
    left_out = _left_out_by_ddp(module)
    forms = {name: _form(strategy, p) for name, p in module.named_parameters() if name not in left_out}
    layers = {
        f"layer {name or 'itself'}": f"{type(layer).__name__}({layer.extra_repr()})"
        for name, layer in module.named_modules()
        if type(layer).__module__.startswith("torch.nn.modules.")
    }
    advice = "All ranks must build the same modules, and freeze the same parameters (requires_grad) before the model is prepared"
    check_alike(group, "parameters or layers of the model", forms | layers, advice)


def _form(strategy: Strategy, parameter: Tensor) -> str:
    """The dtype, the whole shape and whether the parameter is trained, as text."""
    shape = (
        "not known yet" if isinstance(parameter, nn.UninitializedParameter) else list(strategy.whole_shape(parameter))
    )
    return f"{parameter.dtype}, {shape}, {'trained' if parameter.requires_grad else 'frozen'}"


class RankDifferences(Compared):
    """The state that the ranks of a training must have in common: plain values in the optimizers' groups (learning rates, weight decay), the
    ``requires_grad`` of each parameter, and the values of parameters that each rank has whole.

    A checksum of the first two travels with the ranks' :class:`engine.distributed.agreement.Agreement` and with saves. So do the parameters' version
    counters, which every change in place raises: only when a rank has changed parameters alone are their values compared. A change through
    ``p.data`` raises none. Under DDP on CPUs a save compares a checksum of the values, too, and warns once, because kernels may round differently
    on each rank; on other devices, where a save would wait for it, and at other times :class:`callbacks.ReplicaCheck` compares them.

    Args:
        group: the ranks.
        strategy: says which parameters a rank has whole.
        models: the modules that are trained.
        optimizers: their optimizers.
    """

    def __init__(
        self, group: Group, strategy: Strategy, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> None:
        self._group, self._models, self._optimizers = group, models, optimizers
        self._record()
        left_out = set().union(*(_left_out_by_ddp(model) for model in models))
        self._replica_names = [
            name
            for name, p in self._named.items()
            if name not in left_out and not (is_sharded(p) or p.is_meta or p.is_inference())
            if not isinstance(p, nn.UninitializedParameter) and strategy.flat_range(p) is None
        ]
        self._replicas = [self._named[name] for name in self._replica_names]
        self._versions = self._current_versions()
        self._settings: list[list[dict[str, Any]]] = []
        self._trained = b""
        # Elsewhere a save would wait for the device.
        self._compares_values = isinstance(strategy, DDP) and not accelerator.has_streams(group.device)
        self._has_warned = False
        self._false_alarms = 0

    def _record(self) -> None:
        """Record the models' parameters as they are now."""
        self._records = [TrainedParameters(model) for model in self._models]
        self._named: dict[str, Tensor] = {
            name if number == 0 else f"{name} of model {number + 1}": p
            for number, record in enumerate(self._records)
            for name, p in record.named.items()
        }

    def numbers(self) -> tuple[float, float]:
        """A checksum of hyperparameters and ``requires_grad``, and the number of changes of parameters in place since the ranks compared them."""
        if not all(record.unchanged() for record in self._records):
            self._follow_models()
        self._settings = [[comparable(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._trained = bytes(map(_requires_grad, self._named.values()))
        changes = sum(self._current_versions()) - sum(self._versions)
        return float(zlib.crc32(self._trained, zlib.crc32(repr(self._settings).encode()))), float(changes)

    def _follow_models(self) -> None:
        """Take over the parameters that the models have now; edits are looked for in those that they have had from the start."""
        before = self._named
        self._record()
        versions = dict(zip(self._replica_names, self._versions, strict=True))
        self._replica_names = [name for name in self._replica_names if self._named.get(name) is before[name]]
        self._replicas = [self._named[name] for name in self._replica_names]
        self._versions = [versions[name] for name in self._replica_names]

    def compare_all(self) -> None:
        """Compare all of the state now, with a collective of its own. All ranks call this together.

        Raises:
            CheckError: ranks differ; raised on all ranks, with the differences.
        """
        rows = gather_json(self._group, [*self.numbers(), self.values()])
        if any(row[:-1] != rows[0][:-1] for row in rows):
            self.compare()
        if any(row[-1] != rows[0][-1] for row in rows):
            self.warn_of_values()

    def compare(self) -> None:
        """Compare over the ranks what :meth:`numbers` has seen last, because the numbers differ. All ranks call this together.

        Raises:
            CheckError: ranks differ; raised on all ranks, with the differences.
        """
        settings = {
            f"optimizer {i}, group {j}, {name}": value
            for i, groups in enumerate(self._settings)
            for j, group in enumerate(groups)
            for name, value in group.items()
        }
        check_equal(
            self._group,
            "hyperparameters",
            settings,
            "A callback, a hook or a schedule must set them on all ranks, to one value: share what only one rank knows with "
            "engine.processes.broadcast_object",
        )
        trained = {f"{name}.requires_grad": bool(flag) for name, flag in zip(self._named, self._trained, strict=True)}
        check_equal(
            self._group, "trained parameters", trained, "Freeze and unfreeze parameters on all ranks, at the same step"
        )
        self._compare_edits()

    def _compare_edits(self) -> None:
        """Compare the values of the parameters that the ranks have changed at different times."""
        changes = [now - before for now, before in zip(self._current_versions(), self._versions, strict=True)]
        rows = gather_json(self._group, dict(zip(self._replica_names, changes, strict=True)))
        edited = [name for name in self._replica_names if len({row.get(name) for row in rows}) > 1]
        check_equal(
            self._group,
            "parameters",
            {name: fingerprint(self._named[name]) for name in edited},  # waits for the device
            "A callback, a hook or the module has changed them on some ranks only: under ddp each rank goes on with its own, and rank 0's are saved. "
            "Change them on all ranks",
        )
        self._versions = self._current_versions()
        self._false_alarms += bool(edited)
        if self._false_alarms == MAX_FALSE_ALARMS:  # something changes them one by one and alike
            self._stop_watching_edits(edited)

    def _stop_watching_edits(self, edited: Sequence[str]) -> None:
        """Look for edits no more, and say so once. ``edited``: the parameters that gave the latest false alarm."""
        self._replica_names, self._replicas, self._versions = [], [], []
        if self._group.is_main:
            logger.warning(
                "the ranks have changed %s at different times, but to the same values, %d times. Each such change costs a comparison of values, "
                "so from now on parameters that a callback, a hook or the module changes on some ranks only are not looked for: change them on "
                "all ranks at the same step, or let ReplicaCheck compare the ranks",
                _listed(edited),
                MAX_FALSE_ALARMS,
            )

    def values(self) -> int:
        return sum(self._sums())

    def _sums(self) -> list[int]:
        """The sum over the bits of each replica under DDP."""
        if not self._compares_values or self._has_warned or not self._replicas:
            return []
        sums = [sum_of_bits(p) for p in self._replicas]
        return torch.stack([total.to(sums[0].device) for total in sums]).tolist()

    def warn_of_values(self) -> None:
        rows = gather_json(self._group, dict(zip(self._replica_names, self._sums(), strict=True)))
        self._has_warned = True
        names = [name for name in self._replica_names if len({row.get(name) for row in rows}) > 1]
        if names and self._group.is_main:
            logger.warning(
                "the ranks have different values of %s, although each has the whole model; rank 0's are saved. Either a callback, a hook or the "
                "module has changed them on some ranks only, or to different values, or a device computes differently: ReplicaCheck finds the step "
                "and the rank",
                _listed(names),
            )

    def _current_versions(self) -> list[int]:
        return list(map(_version, self._replicas))


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many there are besides."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _left_out_by_ddp(module: nn.Module) -> set[str]:
    """The names of parameters that DDP ignores, because each rank has its own."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        for name in getattr(part, "_ddp_params_and_buffers_to_ignore", ())
    }
