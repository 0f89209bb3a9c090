"""The hooks of a checkpoint that is loaded: ``on_load_checkpoint`` before its weights, ``on_checkpoint_loaded`` after all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.checkpoint.reader import Source
from engine.checkpoint.resume import Loaded
from engine.checkpoint.state_forms import Entries, Fields
from engine.data.datamodule import DataModule
from engine.loop.run import Run
from engine.utils.checksums import sum_of_bits
from engine.utils.log import logger
from engine.utils.overrides import overridden
from engine.utils.text import terminal_text

_SHOWN = 5
"""Names of tensors that a warning shows."""


class LoadHooks:
    """Calls the hooks of one checkpoint, each once.

    Args:
        source: the weights that will be loaded.
    """

    def __init__(self, run: Run, loaded: Loaded, source: Source) -> None:
        self._run, self._loaded, self._source = run, loaded, source
        self._shared: Fields | None = None
        self._entries: Entries | None = None

    @staticmethod
    def need_state(run: Run) -> bool:
        """Whether something in ``run`` needs the state of a checkpoint whose weights alone are loaded."""
        hooks, datamodule = run.hooks, run.datamodule
        return bool(
            hooks.of_module("on_load_checkpoint")
            or hooks.of_module("on_checkpoint_loaded")
            or (datamodule is not None and overridden(datamodule, "load_state_dict", DataModule))
        )

    def before_set_up(self) -> None:
        """Call the module's ``on_load_checkpoint``: before the model is placed and its optimizers are configured, so that it can build layers."""
        self._call(self._run.hooks.of_module("on_load_checkpoint"))

    def before_weights(self) -> None:
        """Call ``on_load_checkpoint`` of the callbacks; warn if no hook reads the entries."""
        run, module_hooks = self._run, self._run.hooks.of_module("on_load_checkpoint")
        hooks = [hook for hook in run.hooks.on_load_checkpoint if hook not in module_hooks]
        self._call(hooks)
        user_entries = self._loaded.shared["user"]
        if user_entries and not hooks and not module_hooks and not run.hooks.on_checkpoint_loaded:
            names = terminal_text(", ".join(map(str, user_entries)), one_line=True)
            logger.warning(
                "%s has entries of on_save_checkpoint (%s), and nothing here defines on_load_checkpoint: they are not read",
                self._loaded.path,
                names,
            )

    def after_weights(self, *, resumes: bool) -> None:
        """Call ``on_checkpoint_loaded``.

        Args:
            resumes: a run continues in full: the callbacks' hooks are called, too, and what changes in the model changes in other weights, such as
                averages.
        """
        run = self._run
        hooks = run.hooks.on_checkpoint_loaded if resumes else run.hooks.of_module("on_checkpoint_loaded")
        if not hooks:
            return
        averages = run.other_weights() if resumes else {}
        before = {name: tensor.clone() for name, tensor in self._local_parts().items()} if averages else {}
        owned = run.stage == "fit" and bool(run.optimizers) and run.engine.strategy.owns_weights
        earlier = _fingerprints(run) if owned else {}
        for hook in hooks:
            hook(run, run.module, self._entries_of_checkpoint())
        if owned:
            self._check_owned(earlier)
        if averages:
            run.saver.before_averages()
            _repeat_changes(before, self._local_parts(), averages, run)

    def _check_owned(self, before: Mapping[str, _Fingerprint]) -> None:
        """Check that the hooks have changed no parameter of which the strategy has a copy that the next step would put in its place.

        Raises:
            ValueError: they have.
        """
        after = _fingerprints(self._run)
        changed = [name for name, p in after.items() if p.parameter_id is not None and p.is_other_value(before[name])]
        if changed:
            strategy = type(self._run.engine.strategy).__name__
            raise ValueError(
                f"on_checkpoint_loaded changes {', '.join(changed[:_SHOWN])}, and {strategy} has its own copy of the parameters, with which the next "
                "step overwrites that: change that copy by its own functions, or use strategy='ddp' or 'fsdp'"
            )

    def restore_datamodule(self, strict: bool) -> None:
        """Restore the data module's state, if it was saved by one of this class."""
        datamodule, shared = self._run.datamodule, self._shared_state()
        state, kind = shared.get("datamodule"), shared.get("datamodule_kind")
        if datamodule is None or not state:
            return
        own_kind = type(datamodule).__qualname__
        if kind not in (None, own_kind):
            logger.warning(
                "%s has the state of the data module %s, and this one is %s: it is not restored",
                self._loaded.path, terminal_text(kind, one_line=True), own_kind,
            )  # fmt: skip
            return
        try:
            self._loaded.load_into(own_kind, datamodule.load_state_dict, state)
        except ValueError as error:
            if strict:
                raise ValueError(
                    f"{error}. Resume(path, weights_only=True, strict=False) starts without that state"
                ) from error
            logger.warning("%s: the state of the data module does not fit: %s", self._loaded.path, error)

    def _shared_state(self) -> Fields:
        """The state that all ranks share, or nothing in a file of weights."""
        if self._shared is None:
            self._shared = self._loaded.shared_or_nothing()
        return self._shared

    def _entries_of_checkpoint(self) -> Entries:
        """The dict that the hooks get: all get the same one."""
        if self._entries is None:
            shared, counters = self._shared_state(), self._loaded.manifest.get("counters")
            counts = counters if isinstance(counters, dict) else shared.get("state") or {}
            facts = {"epoch": counts.get("epoch"), "global_step": counts.get("step")}
            facts["hyper_parameters"] = dict(self._run.module.hparams)
            self._entries = Entries(shared.get("user") or {}, facts)
        return self._entries

    def _call(self, hooks: Sequence[Callable[..., Any]]) -> None:
        """Call hooks of ``on_load_checkpoint``, and warn about values that they set and the weights overwrite."""
        run = self._run
        if not hooks:
            return
        before = _fingerprints(run)
        for hook in hooks:
            hook(run, run.module, self._entries_of_checkpoint())
        if run.is_main_process:
            self._warn_about_overwritten(before)

    def _warn_about_overwritten(self, before: Mapping[str, _Fingerprint]) -> None:
        run, source = self._run, self._source
        tensors = _tensors(run)
        changed = [
            name
            for name, after in _fingerprints(run).items()
            if name in before and name in source and after.is_other_value(before[name])
        ]
        overwritten: list[str] = []
        for name in changed:
            if source.stored(name).shape != tensors[name].shape:
                continue
            saved = torch.empty_like(tensors[name], requires_grad=False)
            source.read_model({name: saved})
            if not torch.equal(*run.engine.strategy.local([saved, tensors[name].detach()])):
                overwritten.append(name)
        if overwritten:
            more = f" and {len(overwritten) - _SHOWN} more" if overwritten[_SHOWN:] else ""
            logger.warning(
                "on_load_checkpoint sets %s%s, and the checkpoint's weights, which are loaded after it, overwrite that: set it in "
                "on_checkpoint_loaded(self, checkpoint), which is called after all weights",
                ", ".join(overwritten[:_SHOWN]),
                more,
            )

    def _local_parts(self) -> dict[str, Tensor]:
        """This rank's part of the model's parameters and buffers, by name."""
        strategy = self._run.engine.strategy
        parts = {n: t for n, t in strategy.model_parts(self._run.module).items() if isinstance(t, Tensor)}
        return dict(zip(parts, strategy.local([t.detach() for t in parts.values()]), strict=True))


class _Fingerprint:
    """A tensor's form and the sum of its bits, by which a value that a hook sets is noticed."""

    def __init__(self, tensor: Tensor, local: Tensor) -> None:
        self.parameter_id = id(tensor) if isinstance(tensor, nn.Parameter) else None
        self.form = (local.shape, local.dtype)
        self.total = int(sum_of_bits(local))

    def is_other_value(self, before: _Fingerprint) -> bool:
        """Whether the tensor has another value than ``before``. A parameter that replaces another one is not compared."""
        is_same = (self.parameter_id, self.form) == (before.parameter_id, before.form)
        return is_same and self.total != before.total


def _tensors(run: Run) -> dict[str, Tensor]:
    """The module's parameters and buffers that have values here, by name."""
    module = run.module
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: t for name, t in named if not t.is_meta and not hasattr(t, "ds_id") and t.layout == torch.strided}


def _fingerprints(run: Run) -> dict[str, _Fingerprint]:
    tensors = _tensors(run)
    local = run.engine.strategy.local([t.detach() for t in tensors.values()])
    return {name: _Fingerprint(t, part) for (name, t), part in zip(tensors.items(), local, strict=True)}


@torch.no_grad()
def _repeat_changes(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor], averages: Mapping[str, Mapping[str, Tensor]], run: Run
) -> None:
    """Give the elements in which ``after`` differs from ``before`` to ``averages`` too, by their names."""
    for weights in averages.values():
        local = dict(zip(weights, run.engine.strategy.local(list(weights.values())), strict=True))
        for name, tensor in local.items():
            old, new = before.get(name), after.get(name)
            if old is None or new is None or not old.shape == new.shape == tensor.shape:
                continue
            changed = (new != old) & ~((new != new) & (old != old))  # NaN differs from itself
            tensor.copy_(torch.where(changed, new.to(tensor.dtype), tensor))
