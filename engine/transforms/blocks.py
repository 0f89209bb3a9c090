"""A model's repeated blocks: the default units of sharding, activation checkpointing and compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from engine.utils.errors import nearest

Choice = type[nn.Module] | str
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # without a forward pass


def user_module(model: nn.Module) -> nn.Module:
    """The user's module inside ``model``, which may be a wrapper of Fit's, or ``model`` itself."""
    module: nn.Module = getattr(model, "user_module", model)
    return module


def blocks_of(model: nn.Module, chosen: Sequence[Choice], min_size: int) -> list[nn.Module]:
    """The modules of ``model`` to shard, recompute or compile one by one, inner ones first; never ``model`` itself.

    They are selected by ``chosen`` (classes, names of classes, names of modules with ``*``); without it by ``min_size`` (parameters), else by
    the method ``blocks()`` of the first module that has one, else by :func:`repeated_blocks`.

    Raises:
        ValueError: a choice matches no module, or a module without a forward pass; ``blocks()`` returned something that is not in the model.
    """
    if chosen:
        matches = [m for choice in chosen for m in _chosen(model, choice)]
        ids = {id(m) for m in matches if _size(m) >= min_size}
    elif min_size:
        ids = set()
        _add_large(model, min_size, ids)
    else:
        named = _named_by_model(model)
        ids = {id(m) for m in (repeated_blocks(model) if named is None else named)}
    # In reversed pre-order a module comes after everything inside it.
    return [m for m in reversed(list(model.modules())) if id(m) in ids and m is not model]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Members with parameters of ``nn.ModuleList`` and ``nn.Sequential``, if at least two are of one class; blocks in blocks are not searched."""
    modules: list[nn.Module] = []
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        members = [m for m in model if not isinstance(m, _CONTAINERS) and any(True for _ in m.parameters())]
        counts = Counter(type(m) for m in members)
        modules = [m for m in members if counts[type(m)] > 1]
    for child in model.children():
        if not any(child is m for m in modules):
            modules += repeated_blocks(child)
    return modules


def shared(model: nn.Module, parts: Iterable[nn.Module]) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Two sets of parameters: those that blocks (``parts``) share with the rest of the model, and those that only blocks share."""
    ids = {id(m) for m in parts}
    owners: dict[nn.Parameter, set[int]] = {}

    def walk(module: nn.Module, unit: int) -> None:
        unit = id(module) if id(module) in ids else unit
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(unit)
        for child in module.children():
            walk(child, unit)

    walk(model, 0)
    several = {p: units for p, units in owners.items() if len(units) > 1}
    return {p for p, units in several.items() if 0 in units}, {p for p, units in several.items() if 0 not in units}


def matching(named: Iterable[tuple[str, Tensor]], patterns: Sequence[str], setting: str) -> list[Tensor]:
    """The tensors whose names match one of ``patterns``.

    Raises:
        ValueError: a pattern matches no tensor; the message begins with ``setting``.
    """
    pairs = [(name.removeprefix("module."), tensor) for name, tensor in named]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in pairs):
            names = [name for name, _ in pairs]
            raise ValueError(
                f"{setting}: no parameter is called {pattern!r}{nearest(pattern, names)}; there are {', '.join(names[:8])}, ..."
            )
    return [tensor for name, tensor in pairs if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _chosen(model: nn.Module, choice: Choice) -> list[nn.Module]:
    # Fit shards a module inside a wrapper, where it is named "module".
    pairs = [(name.removeprefix("module."), m) for name, m in model.named_modules() if m is not model]
    if isinstance(choice, str):
        modules = [m for name, m in pairs if fnmatchcase(name, choice) or type(m).__name__ == choice]
    else:
        modules = [m for _, m in pairs if isinstance(m, choice)]
    label = choice if isinstance(choice, str) else choice.__name__
    if not modules:
        classes = sorted({type(m).__name__ for _, m in pairs})
        raise ValueError(
            f"FSDP(blocks=...): no class or module is called {label!r}{nearest(label, classes)}; classes: {', '.join(classes)}"
        )
    if any(isinstance(m, _CONTAINERS) for m in modules):
        raise ValueError(
            f"FSDP(blocks=...): {label!r} is a list of modules and has no forward pass; give its members, {label + '.*'!r}"
        )
    return modules


def _named_by_model(model: nn.Module) -> list[nn.Module] | None:
    # Looked up in the class, because many models have a ModuleList as an attribute of this name.
    owner = next((m for m in model.modules() if callable(getattr(type(m), "blocks", None))), None)
    if owner is None:
        return None
    blocks = list(owner.blocks())  # type: ignore[operator]
    inside = {id(m) for m in model.modules()}
    for m in blocks:
        if not isinstance(m, nn.Module) or id(m) not in inside or isinstance(m, _CONTAINERS):
            raise ValueError(
                f"{type(owner).__name__}.blocks() returned {type(m).__name__}: return modules of the model that have a forward pass"
            )
    return blocks


def _add_large(module: nn.Module, min_size: int, ids: set[int]) -> int:
    """Add the ids of submodules with at least ``min_size`` parameters to ``ids``, children before parents; a chosen one's count only for it.

    Return the number of parameters of ``module`` that no chosen submodule contains, which the caller adds to the parent's.
    """
    size = sum(p.numel() for p in module.parameters(recurse=False)) + sum(
        _add_large(child, min_size, ids) for child in module.children()
    )
    if size < min_size or isinstance(module, _CONTAINERS):
        return size
    ids.add(id(module))
    return 0


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
