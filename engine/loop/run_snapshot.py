"""Collects the content of a run's checkpoint, and restores each part of it; :mod:`engine.loop.run_resume` has the order of a resume."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from engine.callback import Callback
from engine.checkpoint.content import Content
from engine.checkpoint.json_tree import pack
from engine.checkpoint.manifest import SCORED_WITH, TRAINED
from engine.checkpoint.reader import Source
from engine.checkpoint.resume import Loaded, Resume, check_optimizers, check_samples
from engine.checkpoint.schedule_settings import ConfiguredSchedule
from engine.checkpoint.state_forms import Entries, Fields
from engine.config.hyperparameters import as_data
from engine.config.masked import Config
from engine.config.secret_text import without_secrets
from engine.data.datamodule import DataModule
from engine.distributed.agreement import Stopwatch
from engine.distributed.collectives import gather_json
from engine.engine import Engine
from engine.engine_snapshot import TrainedObjects
from engine.loop.callback_states import load_states, states
from engine.loop.loaders import RunLoaders
from engine.loop.logbook import Logbook
from engine.loop.state import Tally, TrainState
from engine.loop.stopping import StopControl
from engine.loop.timing import Intervals
from engine.metrics.recorder import named
from engine.metrics.torchmetrics_states import load_metric_states, metric_states
from engine.module import TrainModule
from engine.step.optimizers import OptimizerSet
from engine.utils.log import logger

MAX_TEXT = 200
"""The maximum length of a hyperparameter in a manifest that is no plain value."""


@dataclass(frozen=True, eq=False)
class RunSnapshot:
    """Collects and restores the state of a run's parts; ``engine.snapshot`` does that for the state of the engine.

    The fields are the parts whose state a run's checkpoint has.
    """

    engine: Engine
    module: TrainModule
    callbacks: Sequence[Callback]
    datamodule: DataModule | None
    state: TrainState
    loaders: RunLoaders
    optimizer_set: OptimizerSet
    logbook: Logbook
    stopwatch: Stopwatch
    items: Tally
    intervals: Intervals
    control: StopControl

    def trained(self) -> TrainedObjects:
        """The module, and its optimizers and schedulers as they are now: hooks may replace them."""
        optimizer_set = self.optimizer_set
        schedulers = [schedule.scheduler for schedule in optimizer_set.schedules]
        return TrainedObjects(self.module, optimizer_set.optimizers, schedulers)

    # -- collecting -----------------------------------------------------------------------------------------------------------------------

    def shared(self) -> dict[str, Any]:
        """The state that is the same on all ranks, without the entries of hooks and the states of callbacks."""
        return {
            **self.engine.snapshot.shared(self.trained(), [self._position()]),
            "state": asdict(self.state),
            **({"skipped_steps": self.engine.skips.count} if self.engine.skips.count else {}),
            **({"epoch_is_cut": True} if self.control.epoch_is_cut else {}),
            "global_batch": self.loaders.global_batch(self.state.epoch),
            "metrics": dict(self.logbook.metrics),
            "elapsed_s": self.stopwatch.seconds(),
            "items": self.items.total(),
            "val_every": self.intervals.validation.state_dict(),
            "datamodule": None if self.datamodule is None else self.datamodule.state_dict(),
            "datamodule_kind": None if self.datamodule is None else type(self.datamodule).__qualname__,
            "hparams": _storable(self.module.hparams),
            "hparams_name": self.module.hparams_name,
            "datamodule_hparams": _storable(getattr(self.datamodule, "hparams", {})),
            "datamodule_hparams_name": getattr(self.datamodule, "hparams_name", None),
            "user": {},
        }

    def content(
        self,
        shared: dict[str, Any],
        weights: Mapping[str, Mapping[str, Any]],
        score: Mapping[str, Any] | None,
        config: Config,
    ) -> Content:
        """Collect what this rank contributes to a checkpoint now.

        Args:
            shared: the result of :meth:`shared`, with the entries that hooks have added.
            weights: the weights that callbacks keep in addition to the parameters.
            score: the checkpoint's score; see :meth:`engine.Run.save_checkpoint`.
            config: the settings; see :attr:`engine.Run.config`.
        """
        shared["callbacks"] = states(self.callbacks)
        facts = {
            "counters": {name: getattr(self.state, name) for name in ("epoch", "step", "batch_idx", "samples")},
            "metrics": dict(self.logbook.metrics),
            "module": f"{type(self.module).__module__}:{type(self.module).__qualname__}",
            "hparams": without_secrets(_as_json(self.module.hparams)),
            "config": config,
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)},
        }
        if weights:
            facts[SCORED_WITH] = self.scored_with(weights, score)
        if score is not None:
            facts["score"] = dict(score)
        content = self.engine.snapshot.content(
            self.module, self.trained(), shared=shared, streams=[self._stream()], facts=facts
        )
        recorder = self.logbook.training
        logged_values: dict[str, Any] = {
            "recorder": recorder.state_dict(),
            "metrics": metric_states(self.module),
            "logged": recorder.logged_metrics(),
        }
        if hook_values := recorder.hook_state_dict():
            logged_values["hook_values"] = hook_values
        if self.control.waiting:
            logged_values["waiting_stops"] = list(self.control.waiting)
        if self.control.asked is not None:  # the run may be killed before it has ended
            logged_values["asked_stop"] = self.control.asked
        # training_step of manual optimization changes weights when it likes, and so do optimizers that switch between two kinds of weights.
        any_time = not self.module.automatic_optimization or bool(self.optimizer_set.modes.switched)
        return replace(
            content,
            of_rank={**content.of_rank, **logged_values},
            other_weights=weights,
            changed_by_steps=None if any_time else content.changed_by_steps,
        )

    def scored_with(self, weights: Mapping[str, Any], score: Mapping[str, Any] | None) -> str:
        """The name of the ``weights`` with which ``score`` was measured: those used in validation, unless the metric was logged in training."""
        if score is not None and score["monitor"] in self.logbook.from_training:
            return TRAINED
        return next((c.validates_with for c in self.callbacks if c.validates_with in weights), None) or TRAINED

    def entries(self, user_entries: Mapping[str, Any]) -> Entries:
        """Create the dict that ``on_save_checkpoint`` and ``on_load_checkpoint`` get, with the entries that hooks have saved (``user_entries``)."""
        counters = {"epoch": self.state.epoch, "global_step": self.state.step}
        return Entries(user_entries, {**counters, "hyper_parameters": dict(self.module.hparams)})

    def _position(self) -> dict[str, Any]:
        """The training loader's position in its data."""
        state, train = self.state, self.loaders.train
        epoch, position = state.finished_epochs, 0 if state.epoch_done else state.position
        if train is None:
            return {"epoch": epoch, "position": position, "samples": None}
        place = {"epoch": epoch, "position": position, "samples": train.samples}
        return {**place, **train.kind_and_draws(epoch, position)}

    def _stream(self) -> Any:
        """The state that the training loader needs in addition to its position, as streams do; ``None``: the position is enough."""
        state, train = self.state, self.loaders.train
        if train is None:
            return None
        return train.carried() if state.epoch_done else train.state(state.position)

    # -- restoring ------------------------------------------------------------------------------------------------------------------------

    def source_of(self, loaded: Loaded, weights: str | None) -> Source:
        """The ``weights`` of a checkpoint: ``"trained"`` or another name; ``None``: those that the score was measured with."""
        return loaded.source if weights == TRAINED else Source(loaded.opened, weights)

    def load_weights(self, loaded: Loaded, source: Source, strict: bool) -> None:
        """Load parameters and buffers from ``source``, the weights of :meth:`source_of`."""
        if source.weights != TRAINED and self.engine.is_main_process:
            logger.info("%s: its weights %r are loaded", loaded.path, source.weights)
        report = self.engine.strategy.load_model(self.module, source, strict and self.module.strict_loading)
        if report:
            logger.warning("%s fits in part: %s", loaded.path, report)

    def restore_order(self, loaded: Loaded) -> None:
        """Restore the seed and the kind of the data order in the training loader, which was prepared before."""
        seed, loaders, train = loaded.shared["seed"], loaded.shared["loaders"], self.loaders.train
        if seed is not None and train is not None:
            train.reseed(seed, loaders[0].get("order") if loaders else None)
        if train is not None and loaders:
            train.continue_draws(loaders[0])

    def restore_counters(self, loaded: Loaded) -> None:
        """Restore the counters that a run has saved."""
        loaded.load_into("the counters", self.state.restore, loaded.shared["state"])

    def restore_shared(self, loaded: Loaded) -> None:
        """Restore the counters, logged values, intervals, data module and callbacks."""
        shared = loaded.shared
        if not loaded.saved_by_run:
            self.state.restore(asdict(self._state_of_loop(loaded)))
            return
        self.restore_counters(loaded)
        self.logbook.metrics.update(shared["metrics"])
        self.stopwatch.seconds_before = shared["elapsed_s"]
        self.items.restore(shared.get("items"))
        self.engine.skips.count = shared.get("skipped_steps", 0)
        loaded.load_into("val_every", self.intervals.validation.load_state_dict, shared["val_every"])
        if self.datamodule is not None and shared["datamodule"] is not None:
            loaded.load_into(type(self.datamodule).__name__, self.datamodule.load_state_dict, shared["datamodule"])
        elif shared["datamodule"]:
            logger.warning("%s has the state of a DataModule, and this run has none: it is not restored", loaded.path)
        loaded.load_into("the callbacks", partial(load_states, self.callbacks, loaded), shared["callbacks"])

    def _state_of_loop(self, loaded: Loaded) -> TrainState:
        """Derive the counters from a checkpoint of ``Engine.save_state``; without ``facts={"step": n}`` each window counts as one step.

        Raises:
            ValueError: the position in the data, or the number of steps, is unknown.
        """
        advice = "load only its weights with Resume(path, weights_only=True)"
        if not loaded.shared["loaders"]:
            raise ValueError(
                f"{loaded.path} was saved by a loop that prepared no loader, so its position in the data is unknown: {advice}"
            )
        saved, loaders, train = loaded.shared["loaders"][0], self.loaders, self.loaders.train
        assert train is not None
        epoch, position, step = saved["epoch"], saved["position"], loaded.manifest.get("step")
        window = self.engine.accumulate_grad_batches = loaders.window_at(epoch)
        index, batches = position // (train.stride // window), loaders.train_batches
        if type(step) is not int:
            if epoch and batches is None:
                raise ValueError(
                    f"{loaded.path} was saved by a loop over data without a length, so its number of steps is unknown: save it with "
                    f'save_state(path, facts={{"step": n}}), or {advice}'
                )
            step = sum(-(-(batches or 0) // loaders.window_at(past)) for past in range(epoch)) + -(-index // window)
        samples = epoch * (saved["samples"] or 0) + position
        return TrainState(epoch, step, index, epoch * (batches or 0) + index, position, index, samples=samples)

    def check(self, loaded: Loaded, how: Resume) -> None:
        """Check that the data, the optimizers and the schedulers match the checkpoint's."""
        state, train, loaders = self.state, self.loaders.train, loaded.shared["loaders"]
        if (
            train is not None
            and state.position
            and not state.epoch_done
            and loaders
            and not train.continues_draws(loaders[0])
        ):
            check_samples(loaded.path, loaders[0], train.samples, train.plan, how.strict)
        if how.optimizer:
            trained = self.trained()
            check_optimizers(loaded, trained.optimizers, trained.schedulers, how)
            if how.hyperparameters == "checkpoint":
                for scheduler, saved in zip(trained.schedulers, loaded.shared["schedulers"], strict=True):
                    ConfiguredSchedule(scheduler).check_length(loaded.path, saved)
        if self.engine.is_main_process and self.module.automatic_optimization:
            self._warn_about_global_batch(loaded)

    def _warn_about_global_batch(self, loaded: Loaded) -> None:
        """Warn if the steps get larger or smaller because the number of ranks has changed."""
        saved, current = loaded.shared.get("global_batch"), self.loaders.global_batch(self.state.epoch)
        ranks, rank_state = self.engine.data_group.world_size, loaded.of_rank(0)
        if None in (saved, current) or saved == current or rank_state is None or rank_state["place"][0] == ranks:
            return
        if self.loaders.batch_sizes is not None and self.loaders.batch_sizes.changes:
            return
        logger.warning(
            "the global batch (samples of a step over all ranks) was %d on %d rank(s), and is %d on the %d of this run: steps and schedules "
            "mean something else. Fit(global_batch_size=%d) keeps it",
            saved, rank_state["place"][0], current, ranks, saved,
        )  # fmt: skip

    def restore_optimizers(self, loaded: Loaded, how: Resume) -> None:
        """Restore optimizers and schedulers."""
        trained = self.trained()
        self.engine.snapshot.restore_optimizers(loaded, how, trained)
        for optimizer in trained.optimizers:
            # A run resumed at an epoch's end steps its schedulers first, which torch would warn about.
            optimizer._opt_called = self.state.step > 0

    def restore_logged_values(self, loaded: Loaded, own_state: Fields | None) -> None:
        """Restore this rank's logged values.

        Args:
            own_state: what this rank saved; ``None`` if the ranks are not those that saved. Rank 0 then takes over the logged values of all of them.
        """
        rank_state, recorder = own_state or loaded.of_rank(0), self.logbook.training
        if rank_state is not None and "recorder" not in rank_state:  # saved by a loop with Engine
            rows = []
        elif own_state is not None:
            rows = [own_state]
        elif self.engine.loss_group.rank == 0:
            rows = [row for row in loaded.of_all_ranks() if row["place"][-1]]
        else:
            rows = []
        loaded.load_into("the logged values", recorder.load_state_dicts, [row["recorder"] for row in rows])
        with recorder.outside_steps():
            hook_values = [row["hook_values"] for row in rows if "hook_values" in row]
            loaded.load_into("the logged values", recorder.load_state_dicts, hook_values)
        loaded.load_into("the metrics", partial(load_metric_states, self.module), [row["metrics"] for row in rows])
        if rank_state is not None:  # a converted checkpoint has no rank's state
            # Under a pipeline only ranks of the last stage have logged metrics; the last rank is one of these.
            last = loaded.of_rank(loaded.manifest["world_size"] - 1)
            if last is not None and "logged" in last:
                logged = [row["logged"] for row in rows] or [named(last["logged"])]
                loaded.load_into("the logged metrics", recorder.load_logged_metrics, logged)

    def restore_stops(self, loaded: Loaded, own_state: Fields | None, ends: Sequence[int] | None) -> None:
        """Restore this rank's requests to stop that were not met: those that wait for ``min_epochs`` and ``min_steps``, and one that was about to end
        the run as it was killed. All of them wait until the training begins.

        Args:
            own_state: as in :meth:`restore_logged_values`: if it is ``None``, rank 0 takes over the requests of all ranks.
            ends: the steps at which the run has ended by itself, where it is resumed to train on: there all requests are met. ``None``: nothing is
                known, as for a checkpoint that was moved; then only requests that wait count.
        """
        step = self.state.step
        self.control.epoch_is_cut = loaded.shared.get("epoch_is_cut", False)
        if ends is not None and step in ends:
            return
        self.control.resumes_killed = ends is not None
        if own_state is not None:
            rows = [own_state]
        else:
            rows = list(loaded.of_all_ranks()) if self.engine.is_main_process else []
        reasons = [reason for row in rows for reason in row.get("waiting_stops", ())]
        if ends is not None and all(end < step for end in ends):
            reasons += [row["asked_stop"] for row in rows if "asked_stop" in row]
        self.control.waiting[:] = dict.fromkeys(reasons)
        self.control.resumes_stop = any(gather_json(self.engine.group, bool(reasons)))

    def restore_stream(self, loaded: Loaded, own_state: Fields | None) -> None:
        """Restore the state of training data that is a stream: this rank's own, or rank 0's if the ranks are not those that saved."""
        rank_state = own_state or loaded.of_rank(0)
        if rank_state is not None:  # a converted checkpoint has no rank's state
            self.loaders.continue_stream(next(iter(rank_state["streams"]), None))


def _storable(values: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a checkpoint can store. Others, such as networks or functions, must be passed again when the module is created."""
    storable: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(TypeError):
            data = as_data(value)
            pack(data)
            storable[name] = data
    return storable


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``values`` to JSON values; those that are not plain become text, cut off after :data:`MAX_TEXT` characters."""
    plain = (str, int, float, bool, type(None))
    return {str(k): v if isinstance(v, plain) else repr(v)[:MAX_TEXT] for k, v in values.items()}
