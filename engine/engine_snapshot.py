"""The state of the objects that one engine has prepared, and the checkpoints of a user's own training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from engine.checkpoint.content import Content, trained_by
from engine.checkpoint.json_tree import pack
from engine.checkpoint.resume import (
    Loaded,
    Resume,
    check_optimizers,
    check_samples,
    configure,
    fitting,
    load_scheduler,
    opening,
    rebase,
)
from engine.checkpoint.retention import CheckpointFolder
from engine.checkpoint.schedule_settings import ConfiguredSchedule
from engine.checkpoint.state_forms import Fields
from engine.checkpoint.storage_paths import split_path
from engine.checkpoint.tensor_files import is_dtensor
from engine.checkpoint.writer import CheckpointWriter, SaveRequest
from engine.distributed.collectives import all_or_none
from engine.prepared import Prepared
from engine.step.optimizers import counters, is_of_torch
from engine.step.scaler import Scaler
from engine.transforms.blocks import user_module
from engine.utils.log import logger, warn_once
from engine.utils.seed import capture, restore


@dataclass(frozen=True)
class TrainedObjects:
    """The model, optimizers and schedulers whose states a checkpoint has."""

    module: nn.Module
    """The module whose parameter names the checkpoint uses."""
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    """The learning rate schedulers."""

    def kinds(self) -> dict[str, list[str]]:
        """The class names of optimizers and schedulers, which are saved because another class would load a state and ignore what it does not know."""
        return {
            "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
            "schedulers": [type(scheduler).__name__ for scheduler in self.schedulers],
        }

    def hyperparameters(self) -> list[list[dict[str, Any]]]:
        """The current hyperparameters of each optimizer's parameter groups."""
        return [
            [{k: v for k, v in group.items() if k not in {"params", *counters(o)}} for group in o.param_groups]
            for o in self.optimizers
        ]


class EngineSnapshot:
    """Collects and restores the state that one engine has, in the parts that both doors save.

    :class:`EngineCheckpoints` adds the loaders of a user's own loop, :class:`engine.loop.run_snapshot.RunSnapshot` the state of a run.

    Args:
        scaler: what :meth:`engine.strategies.base.Strategy.scaler` returned.
    """

    def __init__(self, prepared: Prepared, scaler: Scaler | None) -> None:
        self._prepared, self._scaler = prepared, scaler
        self._strategy, self._agreement = prepared.strategy, prepared.window.weights.agreement
        self._checks: dict[int, RemovableHandle] = {}  # by id of the optimizer

    def check_after_first_step(self, optimizer: Optimizer) -> None:
        """After the optimizer's first step, check that its state can be stored, as a save would find out later.

        If the run will save (``prepared.saves``), a state that cannot be stored is an error, otherwise a warning. torch's own optimizers are not
        checked, nor those whose state the strategy keeps.
        """
        has_hooks = hasattr(optimizer, "_optimizer_step_post_hooks")
        if is_of_torch(optimizer) or self._strategy.owns_weights or not has_hooks or id(optimizer) in self._checks:
            return
        is_checked = False

        def check(*_: Any) -> None:
            nonlocal is_checked
            if not is_checked:  # a hook cannot remove itself while torch goes through all of them
                is_checked = True
                self._check_state(optimizer)

        self._checks[id(optimizer)] = optimizer.register_step_post_hook(check)

    def leave(self) -> None:
        """Remove the hooks by which optimizers check, after their first step, that their state can be saved."""
        for handle in self._checks.values():
            handle.remove()
        self._checks.clear()

    def _check_state(self, optimizer: Optimizer) -> None:
        """Raise, or warn about, what a save of the optimizer's state would raise. All ranks call this."""
        try:
            pack(self._strategy.optimizer_parts(optimizer, user_module(self._prepared.whole_module())), is_dtensor)
        except (TypeError, ValueError) as error:
            name = type(optimizer).__name__
            message = str(error) if str(error).startswith(name) else f"{name}: {error}"
            if self._prepared.saves:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                raise kind(f"{message} (found after the first step, before a checkpoint was due)") from None
            warn_once(f"a checkpoint of this training will be an error: {message}")

    # -- collecting -----------------------------------------------------------------------------------------------------------------------

    def shared(self, trained: TrainedObjects, loaders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state that all ranks share, in the form of :mod:`engine.checkpoint.state_forms`.

        Args:
            loaders: each loader's position in its data.
        """
        random = self._prepared.optimizer_random.state_dict()
        return {
            **({} if random is None else {"optimizer_random": random}),
            "seed": self._prepared.seed,
            "schedulers": [scheduler.state_dict() for scheduler in trained.schedulers],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "window": self._agreement.state_dict(),
            "registered": [item.state_dict() for item in self._prepared.registered],
            "loaders": list(loaders),
            "kinds": trained.kinds(),
        }

    def content(
        self,
        model: nn.Module,
        trained: TrainedObjects,
        *,
        shared: Mapping[str, Any],
        streams: Sequence[Any],
        facts: Mapping[str, Any],
    ) -> Content:
        """Collect what this rank contributes to a checkpoint now.

        Args:
            model: the part of ``trained.module`` whose weights are saved here.
            shared: the result of :meth:`shared`, perhaps with more entries.
            streams: by loader, the state that it needs in addition to its position, as streams do; ``None``: the position is enough.
            facts: small JSON values for the manifest.
        """
        strategy = self._strategy
        return Content(
            model=strategy.model_parts(model),
            optimizers={str(i): strategy.optimizer_parts(o, trained.module) for i, o in enumerate(trained.optimizers)},
            shared=shared,
            of_rank={"place": self._data_rank(), "rng": self._random_states(), "streams": list(streams)},
            facts=facts,
            parts_differ=strategy.parts_differ or strategy.optimizer_parts_differ,
            changed_by_steps=trained_by(trained.optimizers),
        )

    def _random_states(self) -> dict[str, Any]:
        """The states of this rank's random number generators, and of those that optimizers have themselves."""
        of_optimizers = self._prepared.optimizer_random.generator_states()
        return {**capture(), **({"optimizers": of_optimizers} if of_optimizers else {})}

    def _data_rank(self) -> list[int]:
        """The number of ranks that see different data, this rank's index among them, and 1 if its losses count, else 0."""
        group = self._strategy.data_group
        return [group.world_size, group.rank, int(self._strategy.is_counted)]

    # -- restoring ------------------------------------------------------------------------------------------------------------------------

    def restore_seed(self, loaded: Loaded) -> None:
        """Restore the seed of the data order."""
        if loaded.shared["seed"] is not None:
            self._prepared.seed = loaded.shared["seed"]

    def restore_shared(self, loaded: Loaded) -> None:
        """Restore the loss scaler, the accumulation window and the registered objects.

        Raises:
            ValueError: the number of registered objects differs.
        """
        shared = loaded.shared
        if self._scaler is not None and shared["scaler"]:
            loaded.load_into("the loss scaler", self._scaler.load_state_dict, shared["scaler"])
        if shared.get("window") is not None:
            loaded.load_into("the window", self._agreement.load_state_dict, shared["window"])
        loaded.load_into("objects that are registered", self._restore_registered, shared["registered"])

    def _restore_registered(self, states: list[Any]) -> None:
        """Restore the objects of ``register_for_checkpointing``, which must be as many as were saved."""
        registered = self._prepared.registered
        if len(states) != len(registered):
            raise ValueError(
                f"the checkpoint has {len(states)} object(s) of register_for_checkpointing, and {len(registered)} are registered: "
                "register the same ones before loading"
            )
        for item, state in zip(registered, states, strict=True):
            item.load_state_dict(state)

    def restore_optimizers(self, loaded: Loaded, how: Resume, trained: TrainedObjects) -> None:
        """Restore optimizers and schedulers, which :func:`engine.checkpoint.resume.check_optimizers` has accepted."""
        source, module, strategy = loaded.source, trained.module, self._strategy
        configured_groups = trained.hyperparameters()
        configured_schedules = [ConfiguredSchedule(scheduler) for scheduler in trained.schedulers]
        for index, optimizer in enumerate(trained.optimizers):
            state = source.optim[str(index)]
            if not how.strict:
                shapes = {name: strategy.whole_shape(parameter) for name, parameter in module.named_parameters()}
                state = fitting(state, strategy.optimizer_parts(optimizer, module), shapes, source)
            load = partial(strategy.load_optimizer, optimizer, module, source=source)
            loaded.load_into(f"optimizer {index} ({type(optimizer).__name__})", load, state)
        if loaded.shared.get("optimizer_random") is not None:
            self._prepared.optimizer_random.load_state_dict(loaded.shared["optimizer_random"])
        for index, state in enumerate(loaded.shared["schedulers"]):
            load_scheduler(loaded, index, trained.schedulers[index], state)
        if how.hyperparameters == "configured":
            for optimizer, groups in zip(trained.optimizers, configured_groups, strict=True):
                configure(optimizer, groups)
            for scheduler in trained.schedulers:
                rebase(scheduler)
            for schedule, state in zip(configured_schedules, loaded.shared["schedulers"], strict=True):
                siblings = [scheduler for scheduler in trained.schedulers if scheduler is not schedule.scheduler]
                schedule.continue_configured(state, siblings)

    def own_state(self, loaded: Loaded) -> Fields | None:
        """The state that this rank has saved itself; ``None``, on all ranks, if the ranks are not those that saved. A collective."""
        return loaded.of_same_rank(self._data_rank())

    def restore_random_numbers(self, loaded: Loaded, own_state: Fields | None) -> None:
        """Restore the states of the random number generators from :meth:`own_state`; if there is none, they stay those of a new run."""
        if own_state is not None:
            loaded.load_into("random generators", restore, own_state["rng"])
            states = own_state["rng"].get("optimizers", {})
            loaded.load_into("the optimizers' generators", self._prepared.optimizer_random.restore_generators, states)


class EngineCheckpoints:
    """The checkpoints of a user's own training loop; implements :meth:`engine.Engine.save_state` and :meth:`~engine.Engine.load_state`."""

    def __init__(self, prepared: Prepared, snapshot: EngineSnapshot, writer: CheckpointWriter) -> None:
        self._prepared, self._snapshot, self._writer = prepared, snapshot, writer
        self._folder: CheckpointFolder | None = None  # where the latest save went

    def save(
        self, output_dir: str | Path, wait: bool, facts: dict[str, Any], left_out: Sequence[nn.Module] = ()
    ) -> Path | str:
        """Save as :meth:`engine.Engine.save_state` does; ``left_out``: prepared models whose weights are saved elsewhere."""
        stepper = self._prepared.stepper
        stepper.await_verdicts()
        storage, name = split_path(output_dir)
        if self._folder is None or self._folder.storage.root != storage.root:
            self.wait()
            self._folder = CheckpointFolder(self._prepared.group, storage)
        request = SaveRequest(name, asynchronous=not wait)
        path = self._writer.save(self._folder, self._content(facts, left_out), request)
        if not wait:
            stepper.before_step(self._writer.before_step)
        return path

    def _content(self, facts: Mapping[str, Any], left_out: Sequence[nn.Module]) -> Content:
        """Collect what this rank contributes to a checkpoint now. ``left_out``: as in :meth:`save`."""
        model, trained, loaders = self._prepared.without(left_out), self._trained(), self._prepared.loaders
        states = [loader.state_dict() for loader in loaders]
        streams = [state["stream"] for state in states]
        positions = [
            {**{name: value for name, value in state.items() if name != "stream"}, "samples": loader.samples}
            for state, loader in zip(states, loaders, strict=True)
        ]
        shared = self._snapshot.shared(trained, positions)
        return self._snapshot.content(model, trained, shared=shared, streams=streams, facts=facts)

    def _trained(self) -> TrainedObjects:
        prepared = self._prepared
        return TrainedObjects(
            prepared.whole_module(), prepared.optimizers, [entry.scheduler for entry in prepared.schedulers]
        )

    def wait(self) -> None:
        """Wait until the checkpoint in progress is complete.

        Raises:
            RuntimeError: it could not be written.
        """
        if self._folder is not None:
            self._writer.wait(self._folder)

    def load(self, input_dir: str | Path, strict: bool, left_out: Sequence[nn.Module] = ()) -> dict[str, Any]:
        """Load as :meth:`engine.Engine.load_state` does; ``left_out``: prepared models whose weights are loaded elsewhere.

        A run does the same in :class:`engine.loop.run_resume.Resumption`, with hooks and its own state.
        """
        self.wait()
        storage, _ = split_path(input_dir)
        group, snapshot, how = self._prepared.group, self._snapshot, Resume(input_dir, strict=strict)
        with opening(group, storage, str(input_dir)) as loaded:
            self._load_weights(loaded, strict, left_out)
            trained = self._trained()
            snapshot.restore_seed(loaded)
            all_or_none(group, partial(self._check_counts, loaded, trained))  # raises on all ranks if it does on one
            snapshot.restore_shared(loaded)
            _warn_about_unused(loaded, input_dir)
            all_or_none(group, partial(self._check, loaded, how, trained))
            snapshot.restore_optimizers(loaded, how, trained)
            own_state = snapshot.own_state(loaded)
            self._restore_loaders(loaded, own_state)
            snapshot.restore_random_numbers(loaded, own_state)  # last: restoring something else may draw some
            return loaded.manifest

    def _load_weights(self, loaded: Loaded, strict: bool, left_out: Sequence[nn.Module]) -> None:
        report = self._prepared.strategy.load_model(self._prepared.without(left_out), loaded.source, strict)
        if report:
            logger.warning("%s fits in part: %s", loaded.path, report)

    def _check_counts(self, loaded: Loaded, trained: TrainedObjects) -> None:
        """Check that as many optimizers, schedulers and loaders were prepared as the checkpoint has."""
        prepared, shared, source = self._prepared, loaded.shared, loaded.source
        counts = (len(trained.optimizers), len(trained.schedulers), len(prepared.loaders))
        # A run saves the position of its training loader alone; it goes to the first loader, and any others start from the beginning.
        loaders = max(counts[2], 1) if loaded.saved_by_run else len(shared["loaders"])
        saved = (len(source.optim), len(shared["schedulers"]), loaders)
        if saved != counts:
            raise ValueError(
                f"{loaded.path} has (optimizers, schedulers, loaders) = {saved}, and {counts} were prepared: prepare the same objects before loading"
            )

    def _check(self, loaded: Loaded, how: Resume, trained: TrainedObjects) -> None:
        """Check that the optimizers, the schedulers and the data match the checkpoint's."""
        check_optimizers(loaded, trained.optimizers, trained.schedulers, how)
        for loader, state in zip(self._prepared.loaders, loaded.shared["loaders"], strict=False):
            if state["position"] and not loader.continues_draws(state):
                check_samples(loaded.path, state, loader.samples, loader.plan, how.strict)

    def _restore_loaders(self, loaded: Loaded, own_state: Fields | None) -> None:
        """Restore each loader's position in its data; a stream continues from rank 0's state if the ranks are not those that saved."""
        prepared, shared = self._prepared, loaded.shared
        rank_state = loaded.of_rank(0) if own_state is None else own_state
        # A converted checkpoint has no rank's state.
        streams = [None] * len(shared["loaders"]) if rank_state is None else rank_state["streams"]
        for loader, state, stream in zip(prepared.loaders, shared["loaders"], streams, strict=False):
            loader.reseed(prepared.seed, state.get("order"))
            loader.load_state_dict({**state, "stream": stream})


def _warn_about_unused(loaded: Loaded, input_dir: str | Path) -> None:
    """Warn about what a run has saved and a user's own loop does not restore."""
    if unused := [name for name in ("callbacks", "datamodule", "user") if loaded.shared.get(name)]:
        names = ", ".join(unused)
        logger.warning("%s was saved by a run; your own loop does not use its %s", input_dir, names)
