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
    """The user's own module, which Fit may have wrapped."""
    found: nn.Module = getattr(model, "user_module", model)
    return found


def units(model: nn.Module, chosen: Sequence[Choice], min_size: int) -> list[nn.Module]:
    """The modules to shard one by one, inner ones first; never ``model`` itself.

    By ``chosen`` (classes, names of classes, names of modules with ``*``); else by ``min_size`` (parameters); else by the first
    module's method ``blocks()``; else :func:`repeated`.

    Raises:
        ValueError: a choice that matches no module, or one without a forward pass; ``blocks()`` returned something that is not in the model.
    """
    if chosen:
        found = [m for choice in chosen for m in _fitting(model, choice)]
        wanted = {id(m) for m in found if _size(m) >= min_size}
    elif min_size:
        wanted = set()
        _large(model, min_size, wanted)
    else:
        named = _named_by_model(model)
        wanted = {id(m) for m in (repeated(model) if named is None else named)}
    # Reversed pre-order: a module comes after everything inside it.
    return [m for m in reversed(list(model.modules())) if id(m) in wanted and m is not model]


def repeated(model: nn.Module) -> list[nn.Module]:
    """Members of ``nn.ModuleList`` and ``nn.Sequential`` that are at least two of one class and have parameters; the outermost such lists."""
    found: list[nn.Module] = []
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        members = [m for m in model if not isinstance(m, _CONTAINERS) and any(True for _ in m.parameters())]
        counts = Counter(type(m) for m in members)
        found = [m for m in members if counts[type(m)] > 1]
    for child in model.children():
        if not any(child is m for m in found):
            found += repeated(child)
    return found


def shared(model: nn.Module, parts: Iterable[nn.Module]) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Shared parameters: those of several blocks and the rest of the model, and those of blocks only."""
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
    several = {p: held for p, held in owners.items() if len(held) > 1}
    return {p for p, held in several.items() if 0 in held}, {p for p, held in several.items() if 0 not in held}


def matching(named: Iterable[tuple[str, Tensor]], patterns: Sequence[str], setting: str) -> list[Tensor]:
    """The tensors whose name matches one of ``patterns``.

    Raises:
        ValueError: a pattern matches none; the message names ``setting``.
    """
    pairs = [(name.removeprefix("module."), tensor) for name, tensor in named]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in pairs):
            names = [name for name, _ in pairs]
            raise ValueError(
                f"{setting}: no parameter is called {pattern!r}{nearest(pattern, names)}; there are {', '.join(names[:8])}, ..."
            )
    return [tensor for name, tensor in pairs if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _fitting(model: nn.Module, choice: Choice) -> list[nn.Module]:
    # Fit shards a module inside a wrapper, where it is named "module".
    pairs = [(name.removeprefix("module."), m) for name, m in model.named_modules() if m is not model]
    if isinstance(choice, str):
        found = [m for name, m in pairs if fnmatchcase(name, choice) or type(m).__name__ == choice]
    else:
        found = [m for _, m in pairs if isinstance(m, choice)]
    label = choice if isinstance(choice, str) else choice.__name__
    if not found:
        known = sorted({type(m).__name__ for _, m in pairs})
        raise ValueError(
            f"FSDP(blocks=...): no class or module is called {label!r}{nearest(label, known)}; classes: {', '.join(known)}"
        )
    if any(isinstance(m, _CONTAINERS) for m in found):
        raise ValueError(
            f"FSDP(blocks=...): {label!r} is a list of modules and has no forward pass; give its members, {label + '.*'!r}"
        )
    return found


def _named_by_model(model: nn.Module) -> list[nn.Module] | None:
    # From the class: many models have an attribute of this name, a ModuleList.
    owner = next((m for m in model.modules() if callable(getattr(type(m), "blocks", None))), None)
    if owner is None:
        return None
    given = list(owner.blocks())  # type: ignore[operator]
    inside = {id(m) for m in model.modules()}
    for m in given:
        if not isinstance(m, nn.Module) or id(m) not in inside or isinstance(m, _CONTAINERS):
            raise ValueError(
                f"{type(owner).__name__}.blocks() returned {type(m).__name__}: return modules of the model that have a forward pass"
            )
    return given


def _large(module: nn.Module, least: int, wanted: set[int]) -> int:
    """Choose from the inside out; return the size of the rest of ``module`` for its parents."""
    left = sum(p.numel() for p in module.parameters(recurse=False)) + sum(
        _large(child, least, wanted) for child in module.children()
    )
    if left < least or isinstance(module, _CONTAINERS):
        return left
    wanted.add(id(module))
    return 0


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
