"""Building models without memory for their parameters, and initializing them module by module while they are sharded."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from engine.strategies import recorded_values
from engine.transforms.blocks import user_module
from engine.utils import torch_private

_RECORDED_NAMES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By module, the names of its own parameters with recorded values."""


@contextmanager
def parameters_deferred() -> Iterator[None]:
    """Put the parameters that modules register inside the block on the meta device; shared ones stay shared, buffers keep their values."""
    with _registering(_without_memory):
        yield


@contextmanager
def nothing_recorded() -> Iterator[None]:
    """Inside the block :func:`parameters_deferred` holds, and a recording around it does not: what is built gets its values elsewhere."""
    with torch_private.without_modes(), parameters_deferred():
        yield


@contextmanager
def values_recorded() -> Iterator[None]:
    """Do what :func:`parameters_deferred` does, and record the values that the parameters would have, for :func:`materialise`.

    Parameters that the block has not created, but registers, stay as they are. In a simulation, whose tensors have no values, nothing is recorded.

    Raises:
        ValueError: the block reads the values of a parameter in a way that cannot be recorded.
    """
    if torch_private.is_simulated():
        with parameters_deferred():
            yield
        return
    owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
    with (
        _advice_on_errors("configure_model"),
        warnings.catch_warnings(),
        _registering(partial(_recorded_stand_in, owners)),
        _buffers_with_values(),
        recorded_values.Recording(),
    ):
        # load_state_dict believes that a parameter without memory does not take its values.
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter in the checkpoint to a meta parameter")
        yield
    for owner in owners:
        for name, value in vars(owner).items():
            if isinstance(value, Tensor) and recorded_values.is_recorded(value):  # neither a parameter nor a buffer
                vars(owner)[name] = recorded_values.recorded_value(value)
        _RECORDED_NAMES[owner] = [
            n for n, p in owner._parameters.items() if p is not None and recorded_values.is_recorded(p)
        ]


def recorded_further(model: nn.Module) -> AbstractContextManager[Any]:
    """A context in which changes to parameters whose values :func:`values_recorded` has recorded are recorded, too."""
    if torch_private.is_simulated() or not any(map(recorded_values.is_recorded, model.parameters())):
        return nullcontext()
    return recorded_values.Recording()


def check_recorded(model: nn.Module) -> None:
    """Check that what had recorded values has them still, or got memory.

    Raises:
        ValueError: something has put other tensors without memory in the place of recorded ones.
    """
    lost = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, inner in model.named_modules()
        for name in _RECORDED_NAMES.get(inner, ())
        if (p := inner._parameters.get(name)) is not None
        and recorded_values.has_no_memory(p)
        and not recorded_values.is_recorded(p)
    ]
    if lost:
        raise ValueError(
            f"the initial values of {', '.join(lost[:5])}{' and others' if len(lost) > 5 else ''} are lost: under a strategy that shards it, a "
            "parameter that configure_model has built has no memory before the training starts, and a change after configure_model (such as "
            "module.double(), or a new nn.Parameter of the old one) cannot be repeated; change it in configure_model"
        )


@contextmanager
def _advice_on_errors(method: str) -> Iterator[None]:
    """Explain torch's errors about tensors without memory, which the user's ``method`` gets.

    Raises:
        ValueError: there was such an error.
    """
    try:
        yield
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise ValueError(
            f"{method} reads a parameter in a way that cannot be repeated later, and under a strategy that shards it has no memory yet ({error}): "
            "give it its values there, or in init_weights(self, module), by torch's operations on the parameter itself, for example "
            "parameter.copy_(torch.from_numpy(values)) under torch.no_grad()"
        ) from error


@contextmanager
def _registering(replacement: Callable[[nn.Module, nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """Inside the block, modules that register a parameter of torch's class get its ``replacement``, or keep it if that is ``None``."""
    register = nn.Module.register_parameter
    replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def register_replacement(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        parameter = self._parameters[name]
        if parameter is None or type(parameter) is not nn.Parameter or recorded_values.has_no_memory(parameter):
            return
        if parameter not in replaced:
            replaced[parameter] = replacement(self, parameter)
        if replaced[parameter] is not None:
            self._parameters[name] = replaced[parameter]

    nn.Module.register_parameter = register_replacement  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _buffers_with_values() -> Iterator[None]:
    """Inside the block, modules that register a buffer whose values are recorded get it with memory."""
    register = nn.Module.register_buffer

    def register_with_values(self: nn.Module, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        recording = recorded_values.active()
        if tensor is not None and recording is not None and recorded_values.is_recorded(tensor):
            tensor = recording.with_memory(tensor)
        register(self, name, tensor, persistent)

    nn.Module.register_buffer = register_with_values  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_buffer = register  # type: ignore[method-assign]


def _without_memory(owner: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)


def _recorded_stand_in(owners: WeakIdKeyDictionary, owner: nn.Module, parameter: nn.Parameter) -> nn.Parameter | None:
    """The replacement of a parameter whose values are recorded; ``owners`` gets its module."""
    owners[owner] = True
    recording = recorded_values.active()
    return None if recording is None else recording.stand_in(parameter)


def lacks_values(module: nn.Module) -> bool:
    """Whether a parameter or buffer has neither values nor recorded ones."""
    return any(t.is_meta and not recorded_values.is_recorded(t) for t in (*module.parameters(), *module.buffers()))


def is_deferred(module: nn.Module, away: Container[Tensor] = ()) -> bool:
    """Whether a parameter or buffer has no values, other than those that are ``away`` on other ranks."""
    return any(t.is_meta and t not in away for t in (*module.parameters(), *module.buffers()))


def materialise(
    module: nn.Module,
    device: torch.device,
    initialise: Callable[[nn.Module], None] | None,
    away: Container[Tensor] = (),
) -> dict[Tensor, Tensor]:
    """Allocate parameters and buffers without values on ``device``, and give them the recorded ones, or else initialize them.

    Inside a recording nothing is allocated; the initialization is recorded.

    Args:
        initialise: a function to call with each submodule that got memory and has no recorded values; ``None``: the memory stays uninitialized.
        away: parameters that only other ranks keep; they are not touched.

    Returns:
        The tensors with memory, by the parameters and buffers that they have replaced.

    Raises:
        ValueError: ``initialise`` cannot initialize a module with parameters or buffers of its own.
    """
    replacements: dict[Tensor, Tensor] = {}
    for inner in module.modules():
        stores: tuple[dict[str, Any], ...] = (inner._parameters, inner._buffers)
        # Keys of a dict are compared by identity, items of a list by their values.
        tensors = dict.fromkeys(t for store in stores for t in store.values() if t is not None and t not in away)
        lacking = {
            t: _with_memory(t, device)
            for t in tensors
            if t.is_meta and not recorded_values.is_recorded(t) and t not in replacements
        }
        replacements.update(lacking)
        for tensor in tensors:
            if tensor.is_meta and recorded_values.is_recorded(tensor) and tensor not in replacements:
                replacements[tensor] = _with_recorded_value(tensor, device, initialise is not None)
        for store in stores:
            store.update({key: replacements[t] for key, t in store.items() if t is not None and t in replacements})
        if lacking and initialise is not None:
            # The others have values, which stay.
            real = [replacements.get(t, t) for t in tensors if t not in lacking]
            values = [t.detach().clone() for t in real]
            initialise(inner)
            with torch.no_grad():
                for tensor, value in zip(real, values, strict=True):
                    tensor.copy_(value)
    return replacements


def record_initial_values(
    module: nn.Module, device: torch.device, initialise: Callable[[nn.Module], None]
) -> dict[Tensor, Tensor]:
    """Initialize what has no values as :func:`materialise` does for the whole ``module`` at once, but only record it: random numbers are drawn in
    the order of the modules, whichever part gets its memory first.

    Returns, Raises:
        As :func:`materialise`.
    """
    with _advice_on_errors("init_weights"), recorded_values.Recording():
        return materialise(module, device, initialise)


def initialiser(model: nn.Module) -> Callable[[nn.Module], None]:
    """The function that initializes a module of ``model``: the model's ``init_weights(module)``, or else the module's ``reset_parameters()``."""
    owner: Any = user_module(model)
    method: Any = getattr(type(owner), "init_weights", None)
    # Hugging Face's method of this name has no argument, and initializes a whole model.
    takes_module = method is not None and len(inspect.signature(method).parameters) == 2
    initialise: Callable[[nn.Module], None] = owner.init_weights if takes_module else reset
    return initialise


def reset(module: nn.Module) -> None:
    """Initialize a module by its ``reset_parameters()``.

    Raises:
        ValueError: the module has no such method.
    """
    method: Any = getattr(module, "reset_parameters", None)
    if method is None:
        names = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        raise ValueError(
            f"{type(module).__name__} was built without memory and has no reset_parameters() to give {', '.join(names)} values: define it, or "
            "init_weights(self, module) in the TrainModule, which is called for each such module"
        )
    method()


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    recording = recorded_values.active()
    memory = torch.empty_like(tensor, device=device) if recording is None else recording.reserved(tensor, device)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


def _with_recorded_value(tensor: Tensor, device: torch.device, with_values: bool) -> Tensor:
    """The ``tensor`` on ``device``, with the values that were recorded for it; without ``with_values``, which rank 0 will send, with any."""
    if not with_values:
        return _with_memory(tensor, device)
    value = recorded_values.recorded_value(tensor).to(device)
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
