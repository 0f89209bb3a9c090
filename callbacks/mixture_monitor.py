"""How much of each source of a mixture the training has seen, and the loss on each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine import Callback, CombinedLoader, Device, Mixture, Run


class MixtureMonitor(Callback):
    """Adds, for each source of the training's :class:`engine.Mixture`, to the metrics at log boundaries:

    ========================  ========================================================================================
    ``mixture/web/samples``   the samples that the training has seen of the source ``web``, over all ranks
    ``mixture/web/epochs``    the passes over it: samples by its size; not for streams
    ``mixture/web/share``     its share of all samples so far
    ``mixture/web/fraction``  its share of the samples since the last log boundary
    ``mixture/web/tokens``    samples times ``tokens_per_sample``, if the source has this attribute; else the sum of ``counts``
    ``mixture/web/loss``      the mean loss of its samples since the last log boundary
    ``mixture/web/val_loss``  the same of a validation whose batches have the mixture's ``source_key``
    ========================  ========================================================================================

    The last values are the table ``"mixture"`` in ``Result.tables`` and in a report.

    Losses need ``Mixture(source_key="source")``, which puts the number of its source into each sample, and a step that returns the loss of each
    sample, and may return what it counts, such as its tokens::

        def training_step(self, batch, batch_idx):
            losses = self.losses(batch)  # [B]
            return {"loss": losses.mean(), "losses": losses, "counts": batch["tokens"]}

    Samples of a mixture with indices follow from the position in the data: nothing is counted in the loop. Those of streams, and of a mixture in a
    ``CombinedLoader``, are counted from the batches, by ``source_key``. Numbers from batches stay on the device between two log boundaries, where
    the ranks share them in one collective.
    """

    def __init__(self) -> None:
        self._run: Run | None = None
        self._mixture: Mixture | None = None
        self._samples: dict[str, int] = {}
        self._tokens: dict[str, float] = {}
        self._clear()

    def _clear(self) -> None:
        self._epoch = self._position = 0
        self._from_positions = self._validating = False
        self._reported: dict[str, int] = {}
        self._losses: dict[str, float] = {}
        self._measured: set[str] = set()
        """The sources whose losses are of this interval."""
        self._tally: Tensor | None = None
        self._validation_tally: Tensor | None = None

    # -- events ---------------------------------------------------------------------------------------------------------------------

    def setup(self, run: Run, module: nn.Module, stage: str) -> None:
        self._samples, self._tokens, self._run, self._mixture = {}, {}, None, None
        self._clear()

    def on_train_start(self, run: Run, module: nn.Module) -> None:
        """Find the mixture.

        Raises:
            ValueError: the training data has no mixture, or one whose samples cannot be counted.
        """
        loader = run.train_loader
        assert loader is not None
        self._run, self._mixture = run, _mixture_in(loader.loader)
        if self._mixture is None:
            raise ValueError(
                "MixtureMonitor watches the sources of an engine.Mixture, and the training data has none: give DataLoader(Mixture({...})), or "
                "remove the callback"
            )
        # At the present position: draws before it are unknown, if a resume has changed the mixture.
        epoch, position = run.state.epoch, run.state.position
        self._from_positions = loader.counts_between(epoch, position, position) is not None
        if not self._from_positions and self._mixture.source_key is None:
            raise ValueError(
                "MixtureMonitor counts the samples of streams, and of a mixture in a CombinedLoader, from the batches, which do not tell the "
                "source: give Mixture(source_key='source'), with samples that are dicts"
            )
        self._epoch, self._position = run.state.epoch, run.state.position
        self._reported = dict(self._samples)

    def on_train_epoch_start(self, run: Run, module: nn.Module) -> None:
        self._epoch, self._position = run.state.epoch, run.state.position

    def on_train_epoch_end(self, run: Run, module: nn.Module) -> None:
        self._follow_position()

    def on_train_batch_end(self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._mixture is not None and self._mixture.source_key is not None:
            self._tally = self._counted(self._tally, outputs, batch, run)

    def on_validation_start(self, run: Run, module: nn.Module) -> None:
        self._validating, self._validation_tally = True, None

    def on_validation_batch_end(
        self, run: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._mixture is not None and self._mixture.source_key is not None:
            self._validation_tally = self._counted(self._validation_tally, outputs, batch, run)

    def on_before_log(self, run: Run, module: nn.Module, metrics: dict[str, float], step: int) -> None:
        mixture = self._mixture
        if mixture is None or self._validating:
            return
        self._follow_position()
        self._take_tally(run)
        metrics.update(self._values(mixture))
        run.set_table("mixture", self._rows(mixture))

    def on_validation_epoch_end(self, run: Run, module: nn.Module) -> None:
        mixture = self._mixture
        if mixture is None or mixture.source_key is None:
            return
        _, weights, losses = self._reduced(self._validation_tally, run)
        self._validation_tally = None
        for name, weight, loss in zip(mixture.names, weights, losses, strict=True):
            if weight:
                run.module.log(f"mixture/{name}/val_loss", loss / weight)

    def on_validation_end(self, run: Run, module: nn.Module) -> None:
        self._validating = False

    def on_train_end(self, run: Run, module: nn.Module) -> None:
        if self._mixture is not None:
            self._follow_position()
            self._take_tally(run)
            run.set_table("mixture", self._rows(self._mixture))

    def on_save_checkpoint(self, run: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        self._follow_position()
        if self._run is not None:
            self._take_tally(run)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": dict(self._samples), "tokens": dict(self._tokens)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._samples, self._tokens = dict(state["samples"]), dict(state["tokens"])

    # -- counting -------------------------------------------------------------------------------------------------------------------

    def _follow_position(self) -> None:
        """Add the samples between the position that was looked at last and the present one."""
        run = self._run
        if run is None or not self._from_positions or run.train_loader is None:
            return
        counts = run.train_loader.counts_between(self._epoch, self._position, run.state.position)
        self._position = run.state.position
        for name, count in (counts or {}).items():
            self._samples[name] = self._samples.get(name, 0) + count

    def _counted(self, tally: Tensor | None, outputs: Any, batch: Any, run: Run) -> Tensor | None:
        """The tally with a batch: by source its samples, its losses' weights, and their sum. Shape ``[sources, 3]``, the device's widest dtype."""
        mixture = self._mixture
        assert mixture is not None
        labels = _labels_in(batch, str(mixture.source_key))
        if labels is None or not run.logbook.recorder.size:
            return tally  # another data set's batch, or one that is repeated and does not count
        losses, counts = (
            (outputs.get("losses"), outputs.get("counts")) if isinstance(outputs, Mapping) else (None, None)
        )
        labels = labels.reshape(-1)
        dtype = Device(labels.device).wide
        samples = torch.ones(len(labels), dtype=dtype, device=labels.device)
        weights = torch.zeros_like(samples) if losses is None else samples
        if counts is not None:
            weights = counts.to(dtype).reshape(-1)
        sums = torch.zeros_like(samples) if losses is None else _checked_losses(losses, len(labels)).to(dtype) * weights
        if tally is None:
            tally = torch.zeros(len(mixture.names), 3, dtype=dtype, device=labels.device)
        return tally.index_add_(0, labels.long(), torch.stack([samples, weights, sums], dim=1))

    def _take_tally(self, run: Run) -> None:
        """Add what the batches of all ranks have counted since the last time. A collective."""
        mixture = self._mixture
        if mixture is None or mixture.source_key is None:
            return
        samples, weights, losses = self._reduced(self._tally, run)
        self._tally = None
        for name, count, weight, loss in zip(mixture.names, samples, weights, losses, strict=True):
            if not self._from_positions:
                self._samples[name] = self._samples.get(name, 0) + round(count)
            self._tokens[name] = self._tokens.get(name, 0.0) + weight
            if weight:
                self._losses[name] = loss / weight
                self._measured.add(name)

    def _reduced(self, tally: Tensor | None, run: Run) -> tuple[list[float], list[float], list[float]]:
        assert self._mixture is not None
        local = torch.zeros(len(self._mixture.names), 3, dtype=torch.float64) if tally is None else tally.double().cpu()
        total = run.engine.reduce(local, "sum") * (run.engine.loss_group.world_size / run.world_size)
        samples, weights, losses = total.t().tolist()
        return samples, weights, losses

    # -- values ---------------------------------------------------------------------------------------------------------------------

    def _values(self, mixture: Mixture) -> dict[str, float]:
        since = {name: self._samples.get(name, 0) - self._reported.get(name, 0) for name in mixture.names}
        self._reported = dict(self._samples)
        values = {}
        for row in self._rows(mixture):
            name = row["source"]
            columns = [column for column in row if column != "source" and (column != "loss" or name in self._measured)]
            values.update({f"mixture/{name}/{column}": float(row[column]) for column in columns})
            if sum(since.values()):
                values[f"mixture/{name}/fraction"] = since[name] / sum(since.values())
        self._measured.clear()
        return values

    def _rows(self, mixture: Mixture) -> list[dict[str, Any]]:
        """The table: a row for each source."""
        total, rows = sum(self._samples.values()), []
        for name, source, size in zip(mixture.names, mixture.sources, mixture.sizes, strict=True):
            samples, tokens = self._samples.get(name, 0), getattr(source, "tokens_per_sample", None)
            row: dict[str, Any] = {"source": name, "samples": samples}
            if size is not None:
                row["epochs"] = samples / size
            row["share"] = samples / total if total else 0.0
            if isinstance(tokens, int):
                row["tokens"] = samples * tokens
            elif self._tokens.get(name):
                row["tokens"] = self._tokens[name]
            if name in self._losses:
                row["loss"] = self._losses[name]
            rows.append(row)
        return rows


def _mixture_in(loader: Any) -> Mixture | None:
    """The mixture that a loader reads, also inside a ``CombinedLoader``."""
    members = loader.members if isinstance(loader, CombinedLoader) else [loader]
    datasets = (getattr(member, "dataset", None) for member in members)
    return next((dataset for dataset in datasets if isinstance(dataset, Mixture)), None)


def _labels_in(batch: Any, key: str) -> Tensor | None:
    """The sources of a batch's samples, in the batch or in a part of it; ``None``: it has none."""
    if isinstance(batch, Mapping):
        labels = batch.get(key)
        if isinstance(labels, Tensor):
            return labels
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    inner_labels = (_labels_in(part, key) for part in parts if isinstance(part, (Mapping, list, tuple)))
    return next((labels for labels in inner_labels if labels is not None), None)


def _checked_losses(losses: Any, samples: int) -> Tensor:
    """The losses of a batch's samples, as one row.

    Raises:
        ValueError: there is not one for each sample.
    """
    if not isinstance(losses, Tensor) or losses.numel() != samples:
        what = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"MixtureMonitor: the step returned losses of {what} for {samples} samples: give one loss for each sample, or leave 'losses' out"
        )
    return losses.detach().reshape(-1)
