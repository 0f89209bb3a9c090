"""Linear layers whose matrix products run in fp8, by torchao's float8 training. torchao is imported on first use."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from engine.distributed.group import Group
from engine.transforms.blocks import user_module
from engine.utils import accelerator
from engine.utils.errors import nearest
from engine.utils.log import logger, warn_once

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SIDE = 16
"""The sides of matrices that are multiplied in fp8 must be divisible by this."""


@dataclass(frozen=True, slots=True)
class FP8:
    """Settings of training in fp8, for ``precision=``; ``"fp8-mixed"`` is ``FP8()``.

    The matrix products of ``nn.Linear`` layers, forward and backward, take fp8 inputs with new scales each time; everything else runs as under
    ``bf16-mixed``. Parameters, gradients and optimizer state stay fp32, and names and checkpoints are those of the plain model. Layers are
    changed in place when the model is prepared and changed back when the run or the engine releases it (sharded models are not changed back).

    Some layers stay in bf16: those whose inputs or outputs are not divisible by 16 (logged once); subclasses of ``nn.Linear``; an output layer that
    shares its weight with an embedding, because the embedding reads the weight in full precision, and the logits suffer most from rounding.

    fp8 is faster only with ``compile``, which fuses the scaling and the casts; run one by one they cost more than fp8 saves.
    """

    recipe: str = "tensorwise"
    """``"tensorwise"``: one scale per tensor, the fastest. ``"rowwise"``: one scale per row, more exact. ``"rowwise_with_gw_hp"``: one scale
    per row, and the weight's gradient in bf16, the most exact."""
    ignore: str | Sequence[str] = ()
    """Names of layers that stay in bf16: ``"head"``, ``"layers.0"`` (with all layers inside), ``"*.out"``."""
    all_gather: bool | None = None
    """Under FSDP, gather weights in fp8: half of bf16's traffic, and one reduction per step for the scales of all weights. ``None``: if the
    recipe is ``"tensorwise"``, which allows it, for layers that tensor parallelism has not sharded."""
    emulate: bool | None = None
    """Round to fp8 but multiply in the wider dtype: nearly the same numbers, no speedup. ``None``: only on devices without fp8, which are the
    CPU, NVIDIA GPUs with a compute capability below 8.9, AMD's before gfx94x, and others that refuse torch's product in fp8."""
    backend: str = "torchao"
    """``"torchao"`` is the only backend; ``"te"``, Transformer Engine, was removed."""

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(
                f"FP8(recipe={self.recipe!r}) is unknown{nearest(self.recipe, RECIPES)}; possible: {', '.join(RECIPES)}"
            )
        if self.backend != "torchao":
            reason = "was removed: Transformer Engine was never tested here" if self.backend == "te" else "is unknown"
            raise ValueError(f"FP8(backend={self.backend!r}) {reason}; leave backend out: torchao computes in fp8")
        for name in ("all_gather", "emulate"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"FP8({name}={getattr(self, name)!r}) must be True, False or None")
        patterns = (self.ignore,) if isinstance(self.ignore, str) else tuple(self.ignore)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"FP8(ignore={self.ignore!r}) must be names of layers")
        object.__setattr__(self, "ignore", patterns)
        if self.all_gather and self.recipe != "tensorwise":
            raise ValueError(
                f"FP8(all_gather=True, recipe={self.recipe!r}): weights are gathered in fp8 with recipe='tensorwise' only"
            )

    @property
    def gathers(self) -> bool:
        """Whether FSDP gathers weights in fp8."""
        return self.all_gather is not False and self.recipe == "tensorwise"


class Layers:
    """The layers that one engine computes in fp8. Without fp8 all methods do nothing."""

    def __init__(self, fp8: FP8 | None, group: Group) -> None:
        self.fp8, self._group = fp8, group
        self._changed: list[tuple[nn.Linear, list[str]]] = []

    def convert(self, model: nn.Module) -> nn.Module:
        """Make the linear layers of ``model`` compute in fp8, in place: names, parameters, hooks and references stay.

        Raises:
            ImportError: torchao is not installed.
            ValueError: no layer can be converted, a name in ``ignore`` matches no layer, or the device has no fp8 and ``emulate=False``.
        """
        fp8 = self.fp8
        if fp8 is None:
            return model
        torchao = _torchao()
        emulate, chosen = _emulated(fp8, self._group), _chosen(model, fp8)
        config = dataclasses.replace(torchao.Float8LinearConfig.from_recipe_name(fp8.recipe), emulate=emulate)
        for linear in chosen:
            converted, plain_names = torchao.convert_to_float8_training(linear, config=config), set(vars(linear))
            added = [name for name in vars(converted) if name not in plain_names]
            vars(linear).update({name: vars(converted)[name] for name in added})
            linear.__class__ = _layer_class()
            self._changed.append((linear, added))
        if chosen and emulate:
            logger.warning(
                "fp8 is emulated on %s: this shows its numbers, not its speed", accelerator.name(self._group.device)
            )
        return model

    def restore(self) -> None:
        """Turn the layers back into plain ones, except in sharded models."""
        for linear, added in self._changed:
            if type(linear) is _layer_class() and not _sharded(linear.weight):
                linear.__class__ = nn.Linear
                for name in added:
                    vars(linear).pop(name, None)
        self._changed.clear()


def cast_before_gather(module: nn.Module, ignored: Collection[Tensor]) -> None:
    """Wrap the weights of converted layers in ``module``, so that FSDP casts them before it gathers them. Called before ``fully_shard``.

    Weights in ``ignored`` and weights that are sharded already are skipped.
    """
    torchao, apart = _torchao(), {id(p) for p in ignored}
    parameters = {id(p) for p in module.parameters() if not _sharded(p)} - apart
    layers = [m for m in module.modules() if isinstance(m, _layer_class()) and id(m.weight) in parameters]
    wrapped: dict[int, Any] = {}
    if parameters == {id(layer.weight) for layer in layers} and any(
        layer.weight.device.type == "cpu" for layer in layers
    ):
        return  # gathered alone they would be sent as fp8, which gloo does not support; together with other weights they are sent as bytes
    for layer in layers:
        weight = layer.weight
        if id(weight) not in wrapped:
            with torch.device("meta"):
                shell = nn.Linear(layer.in_features, layer.out_features, bias=False)
            shell.weight = weight
            config: Any = dataclasses.replace(layer.config, enable_fsdp_float8_all_gather=True)
            wrapped[id(weight)] = torchao.convert_to_float8_training(shell, config=config).weight
        layer.weight = wrapped[id(weight)]


class Scales:
    """Computes the scales of all weights that are gathered in fp8, by one reduction in the first forward pass after they have changed.

    As a hook of the sharded root this runs before the first weights are gathered. It detects optimizers' steps by counting them (fused ones do
    not change version counters), and other writes to weights, so that old scales never clip the values of a loaded checkpoint.
    """

    steps = 0
    """The number of steps that all optimizers of this process have made."""

    def __init__(self, root: nn.Module, fp8: FP8) -> None:
        low = _layer_class()
        weights = [m.weight for m in root.modules() if isinstance(m, low) and _sharded(m.weight)]
        self.weights = [w for w in weights if hasattr(w.to_local(), "fsdp_pre_all_gather")]
        if fp8.all_gather and len(self.weights) < len(weights):
            raise ValueError(
                "FP8(all_gather=True): weights that tensor parallel has sharded, and on the CPU those that are alone in an "
                "FSDP block, are gathered in bf16; leave all_gather out"
            )
        self.seen = (-1, -1)
        if self.weights:
            _count_steps()
            root.register_forward_pre_hook(self.renew, prepend=True)

    def renew(self, root: nn.Module, args: Any) -> None:
        """Compute the scales again if weights have changed; a forward pre-hook."""
        seen = (Scales.steps, sum(weight._version for weight in self.weights))
        if seen != self.seen:
            _torchao().precompute_float8_dynamic_scale_for_fsdp(root)
            self.seen = seen


@cache
def _count_steps() -> None:
    """Count the steps of all optimizers from now on, in ``Scales.steps``."""

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        Scales.steps += 1

    register_optimizer_step_post_hook(count)


def _sharded(weight: Tensor) -> bool:
    return hasattr(weight, "placements")  # DTensor, whose import takes longer than this whole library's


def _torchao() -> Any:
    try:
        return import_module("torchao.float8")
    except ImportError as error:
        raise ImportError(f"precision='fp8-mixed' needs torchao ({error}): pip install \"fit-trainer[fp8]\"") from error


def _emulated(fp8: FP8, group: Group) -> bool:
    """Whether to emulate fp8; ``ValueError`` if the device has no fp8 and emulation is forbidden."""
    capable = group.kind.has_fp8
    if fp8.emulate is False and not capable:
        raise ValueError(
            f"FP8(emulate=False): {accelerator.name(group.device)} has no fp8 (it needs an NVIDIA GPU of compute capability 8.9 or later, an AMD GPU "
            "gfx94x, gfx95x or gfx12, or another device with torch's product in fp8); leave emulate out"
        )
    return not capable if fp8.emulate is None else fp8.emulate


@cache
def _layer_class() -> Any:
    """The class of converted layers, which adds autocast and padding of rows to torchao's. Created at its first use, which imports torchao."""
    base: Any = _torchao().float8_linear.Float8Linear

    class Float8Layer(base):
        def forward(self, input: Tensor) -> Tensor:
            kind = input.device.type
            if not torch.is_autocast_enabled(kind):
                return self._multiply(input)
            # torchao checks only CUDA's autocast, with a function that warns.
            with torch.autocast(kind, enabled=False):
                return self._multiply(input.to(torch.get_autocast_dtype(kind)))

        def _multiply(self, input: Tensor) -> Tensor:
            rows = input.numel() // self.in_features
            out: Tensor
            if rows and rows % SIDE == 0:
                out = super().forward(input)
                return out
            # The gradient of the weight is a product over the rows, whose number must be divisible too; rows of zeros add nothing.
            flat = nn.functional.pad(input.reshape(rows, self.in_features), (0, 0, 0, SIDE - rows % SIDE))
            out = super().forward(flat)[:rows]
            return out.reshape(*input.shape[:-1], self.out_features)

    Float8Layer.__module__, Float8Layer.__qualname__ = __name__, "Float8Layer"
    return Float8Layer


def __getattr__(name: str) -> Any:
    if name == "Float8Layer":  # where unpickling looks for the class of a module's layers
        return _layer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _chosen(model: nn.Module, fp8: FP8) -> list[nn.Linear]:
    """The layers to convert; warns about layers that stay in bf16 because of their sizes.

    Raises:
        ValueError: no layer can be converted and none was converted before, or a name in ``ignore`` matches no layer.
    """
    low = _layer_class()
    # In Fit's wrapper the user's module has the name "module".
    named = [(name.removeprefix("module."), m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    used_elsewhere = {
        id(p) for m in model.modules() if not isinstance(m, nn.Linear) for p in m._parameters.values() if p is not None
    }
    for pattern in fp8.ignore:
        if not any(_matches_layer(name, pattern) for name, _ in named):
            names = [name for name, _ in named]
            raise ValueError(
                f"FP8(ignore=...) has {pattern!r}, but {_name(model)} has no such linear layer{nearest(pattern, names)}"
            )
    chosen, indivisible, converted = [], [], 0
    for name, linear in named:
        if isinstance(linear, low):
            converted += 1
        elif (
            type(linear) is not nn.Linear
            or "weight" not in linear._parameters
            or any(_matches_layer(name, p) for p in fp8.ignore)
        ):
            continue
        elif id(linear.weight) in used_elsewhere:
            logger.info("fp8: %s shares its weight with an embedding and stays in bf16", name)
        elif linear.in_features % SIDE or linear.out_features % SIDE:
            indivisible.append(f"{name or 'the layer itself'} ({linear.in_features} to {linear.out_features})")
        else:
            chosen.append(linear)
    if not chosen and not converted:
        raise ValueError(
            f"precision='fp8-mixed': no layer of {_name(model)} can compute in fp8. It has {len(named)} linear layer(s); those of class nn.Linear "
            f"with sizes divisible by {SIDE}, not ignored and not tied to an embedding, can. Other sizes: {_some(indivisible)}. Use 'bf16-mixed'"
        )
    if indivisible:
        warn_once(
            f"fp8: {len(indivisible)} linear layer(s) of {_name(model)} stay in bf16, because their sizes are not divisible by {SIDE}: "
            f"{_some(indivisible)}"
        )
    return chosen


def _matches_layer(name: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a layer or of a module that contains the layer."""
    parts, pattern = name.split("."), pattern.removeprefix("module.")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def _some(names: Sequence[str]) -> str:
    return "none" if not names else ", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else "")


def _name(model: nn.Module) -> str:
    return type(user_module(model)).__name__
