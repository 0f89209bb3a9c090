"""Callbacks with Lightning's signature, ``(trainer, pl_module, ...)``, as callbacks of :class:`engine.Fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from engine.callback import Callback as OwnCallback
from engine.loop.run import Run

EVENTS = tuple(name for name in vars(OwnCallback) if name.startswith("on_") or name in ("setup", "teardown"))
_ONLY_OURS = ("on_before_log", "on_log", "on_media", "on_checkpoint_saved", "on_checkpoint_removed")
THEIRS = tuple(name for name in EVENTS if name not in _ONLY_OURS)
"""Events that Lightning has too."""


class Callback:
    """Subclass it as Lightning's; methods are the events of :class:`engine.Callback`, with ``(trainer, pl_module, ...)``."""

    @property
    def state_key(self) -> str:
        """The name of the callback's state in a checkpoint."""
        return type(self).__qualname__

    def _generate_state_key(self, **values: Any) -> str:
        return f"{type(self).__qualname__}{values!r}"

    def state_dict(self) -> dict[str, Any]:
        """The state to save: tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""


def _empty(event: str) -> Callable[..., None]:
    def hook(self: Callback, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None: ...

    hook.__name__, hook.__qualname__ = event, f"Callback.{event}"
    return hook


for _event in THEIRS:
    setattr(Callback, _event, _empty(_event))


class Wrapped(Callback):
    """A callback of the package ``callbacks`` under Lightning's name: a subclass may override events with Lightning's signature.

    ``class EarlyStopping(Wrapped, of=callbacks.EarlyStopping)``; its constructor calls :meth:`wrap` with the arguments of ``of``. Attributes
    that are not its own are those of the wrapped callback.

    Args:
        of: the class that is wrapped.
        methods: methods of it that a subclass may override; they have the same arguments there and here.
    """

    of: type[OwnCallback]
    ours: OwnCallback
    methods: tuple[str, ...] = ()

    def __init_subclass__(
        cls, of: type[OwnCallback] | None = None, methods: tuple[str, ...] = (), **options: Any
    ) -> None:
        super().__init_subclass__(**options)
        if of is None:
            return
        cls.of, cls.methods = of, methods
        for event in THEIRS:
            if getattr(of, event) is not getattr(OwnCallback, event) and event not in vars(cls):
                setattr(cls, event, _forwarding(event))

    def wrap(self, *args: Any, **kwargs: Any) -> None:
        """Make the wrapped callback."""
        own = [name for name in self.methods if getattr(type(self), name, None) is not None]
        made = type(self.of.__name__, (self.of,), {name: _overriding(getattr(self, name)) for name in own})
        self.__dict__["ours"] = (made if own else self.of)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if "ours" not in self.__dict__:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: call super().__init__() first"
            )
        return getattr(self.ours, name)

    @property
    def state_key(self) -> str:
        return self.ours.state_key

    def state_dict(self) -> dict[str, Any]:
        return self.ours.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ours.load_state_dict(state_dict)


def _forwarding(event: str) -> Callable[..., Any]:
    def hook(self: Wrapped, trainer: Any, pl_module: Any, *args: Any) -> Any:
        return getattr(self.ours, event)(trainer.run, pl_module, *args)

    hook.__name__ = event
    return hook


def _overriding(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: method(*args, **kwargs)


class Adapted(OwnCallback):
    """A ``callback`` written for Lightning, ours or a real ``lightning.Callback``, as one that :class:`engine.Fit` takes.

    Its events get ``run.trainer`` as their trainer.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        base = _base(type(callback))
        ours = callback.ours if isinstance(callback, Wrapped) else None
        for event in EVENTS:
            if event in _ONLY_OURS:
                if ours is not None and getattr(type(ours), event) is not getattr(OwnCallback, event):
                    setattr(self, event, getattr(ours, event))
            elif _overrides(callback, event, base):
                setattr(self, event, _with_trainer(getattr(callback, event)))
        if _overrides(callback, "state_dict", base):
            self.state_dict, self.load_state_dict = callback.state_dict, callback.load_state_dict  # type: ignore[method-assign]
        if ours is not None:
            for name in ("runs_last", "is_logger", "takes", "shows_progress", "critical", "validates_with"):
                setattr(self, name, getattr(ours, name))
            self.other_weights = ours.other_weights  # type: ignore[method-assign]

    @property
    def state_key(self) -> str:
        return str(self.callback.state_key)

    @property
    def checkpoints_in(self) -> Any:
        return getattr(getattr(self.callback, "ours", None), "checkpoints_in", None)

    @property
    def finds_best(self) -> bool:
        return bool(getattr(getattr(self.callback, "ours", None), "finds_best", False))


def _with_trainer(method: Callable[..., Any]) -> Callable[..., Any]:
    def hook(run: Run, module: nn.Module, *args: Any) -> Any:
        return method(run.trainer, getattr(module, "foreign", module), *args)

    return hook


def _base(cls: type) -> type:
    """Lightning's class of callbacks among the bases of ``cls``."""
    found = [each for each in cls.__mro__ if each.__name__ == "Callback" and hasattr(each, "on_train_batch_end")]
    if not found:
        raise TypeError(
            f"{cls.__name__} is not a callback: give objects of lightning.Callback, of engine.Callback, or of "
            "engine.interop.lightning.Callback"
        )
    return found[-1]


def _overrides(callback: Any, name: str, base: type) -> bool:
    method = getattr(callback, name, None)
    return callable(method) and getattr(method, "__func__", None) is not getattr(base, name, None)


def adapted(callback: Any) -> OwnCallback:
    """The ``callback`` as one of :class:`engine.Fit`; its own callbacks are returned as they are.

    Raises:
        TypeError: it is not a callback.
    """
    return callback if isinstance(callback, OwnCallback) else Adapted(callback)
