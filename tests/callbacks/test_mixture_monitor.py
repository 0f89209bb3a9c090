"""How much of each source was seen, against a count of the batches; losses by source against those of each sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from callbacks import MixtureMonitor, ModelCheckpoint, Report
from engine import Callback, CombinedLoader, Fit, Mixture, TrainModule


class Rows(Dataset[dict[str, float]]):
    def __init__(self, value: float, count: int, tokens: int | None = None) -> None:
        self.value, self.count = value, count
        if tokens is not None:
            self.tokens_per_sample = tokens

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, float]:
        return {"x": self.value, "length": 2.0 + index % 2}


class RowStream(IterableDataset[dict[str, float]]):
    def __init__(self, value: float, count: int) -> None:
        self.value, self.count = value, count

    def __iter__(self) -> Iterator[dict[str, float]]:
        return ({"x": self.value, "length": 2.0} for _ in range(self.count))


class Net(TrainModule):
    """The loss of a sample is its value."""

    by_sample = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch.get("mix", batch)
        losses = self.weight * rows["x"]
        if not self.by_sample:
            return losses.mean()
        return {"loss": losses.mean(), "losses": losses, "counts": rows["length"]}

    validation_step = training_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Quiet(Net):
    by_sample = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        return


class Seen(Callback):
    """Counts what comes, and keeps what is logged."""

    def __init__(self) -> None:
        self.counts: Counter[float] = Counter()
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.counts.update(batch.get("mix", batch)["x"].tolist())

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        own = {name.removeprefix("mixture/"): value for name, value in metrics.items() if name.startswith("mixture/")}
        self.rows.setdefault(step, {}).update(own)


def data(**options: Any) -> Mixture:
    return Mixture({"web": Rows(1.0, 60, 8), "code": Rows(3.0, 20, 8)}, {"web": 0.6, "code": 0.4}, **options)


def run(
    loader: Any, folder: Path, *more: Callback, net: type[Net] = Net, val: Any = None, **settings: Any
) -> tuple[Seen, Any]:
    seen, resume = Seen(), settings.pop("resume", None)
    callbacks = [MixtureMonitor(), seen, *more]
    fit = Fit(
        accelerator="cpu",
        devices=1,
        seed=1,
        root_dir=folder,
        check=False,
        callbacks=callbacks,
        log_every_n_steps=4,
        **settings,
    )
    return seen, fit.run(net(), loader, val, resume=resume)


def test_samples_epochs_and_shares_follow_from_the_position(tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=7, shuffle=True)
    seen, result = run(loader, tmp_path, ModelCheckpoint(), Report(), net=Quiet, max_epochs=3)
    assert result.step == 24  # 50 draws an epoch
    last = seen.rows[24]
    assert seen.counts == {1.0: 90, 3.0: 60}
    assert (last["web/samples"], last["code/samples"]) == (90, 60)
    assert (last["web/epochs"], last["code/epochs"]) == (1.5, 3)
    assert (last["web/share"], last["code/share"]) == (0.6, 0.4)
    assert (last["web/tokens"], last["code/tokens"]) == (720, 480)
    row = seen.rows[4]
    assert row["web/samples"] + row["code/samples"] == 28
    assert row["web/fraction"] == (row["web/samples"] - seen.rows[1]["web/samples"]) / 21
    assert abs(sum(seen.rows[8][f"{name}/fraction"] for name in ("web", "code")) - 1) < 1e-9
    assert result.tables["mixture"] == [
        {"source": "web", "samples": 90, "epochs": 1.5, "share": 0.6, "tokens": 720},
        {"source": "code", "samples": 60, "epochs": 3.0, "share": 0.4, "tokens": 480},
    ]
    page = (result.folder / "report.html").read_text()
    assert "<th" in page
    assert all(text in page for text in (">Tables<", ">web<", ">720<"))
    again, result = run(loader, tmp_path / "again", net=Quiet, max_epochs=4, resume=result.last_checkpoint)
    assert [row["samples"] for row in result.tables["mixture"]] == [120, 80]
    assert again.counts == {1.0: 30, 3.0: 20}


def test_a_limit_leaves_samples_out(tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=7, shuffle=True)
    seen, result = run(loader, tmp_path, net=Quiet, max_epochs=2, limit_train_batches=4, accumulate_grad_batches=3)
    assert [row["samples"] for row in result.tables["mixture"]] == [seen.counts[1.0], seen.counts[3.0]]
    assert sum(seen.counts.values()) == 56


def test_losses_and_tokens_by_source(tmp_path: Path) -> None:
    loader = DataLoader(data(source_key="source"), batch_size=7, shuffle=True)
    val = DataLoader(data(source_key="source"), batch_size=10)
    seen, result = run(loader, tmp_path, max_steps=8, val=val, val_every=8)
    assert seen.rows[4]["web/loss"] == seen.rows[8]["web/loss"] == seen.rows[8]["web/val_loss"] == 1.0
    assert seen.rows[4]["code/loss"] == seen.rows[8]["code/loss"] == seen.rows[8]["code/val_loss"] == 3.0
    assert result.tables["mixture"][1]["loss"] == 3.0


@pytest.mark.parametrize("kind", ["streams", "combined"])
def test_streams_and_members_are_counted_from_the_batches(kind: str, tmp_path: Path) -> None:
    def loader() -> Any:
        if kind == "combined":
            mix = DataLoader(data(source_key="source"), batch_size=7, shuffle=True)
            return CombinedLoader({"other": DataLoader(Rows(0.0, 90), batch_size=7), "mix": mix}, "max_size_cycle")
        streams = {"web": RowStream(1.0, 40), "code": Rows(3.0, 20, 8)}
        return DataLoader(Mixture(streams, {"web": 3, "code": 1}, source_key="source"), batch_size=7)

    seen, result = run(loader(), tmp_path, ModelCheckpoint(), max_steps=6)
    rows = result.tables["mixture"]
    assert [row["samples"] for row in rows] == [seen.counts[1.0], seen.counts[3.0]]
    assert rows[1]["tokens"] == 8 * rows[1]["samples"]  # its tokens_per_sample
    assert kind == "combined" or rows[0]["tokens"] == 2 * rows[0]["samples"]  # the counts of the batches
    assert "epochs" in rows[1]
    assert ("epochs" in rows[0]) == (kind == "combined")
    with pytest.warns(UserWarning, match="has no state") if kind == "streams" else _nothing():
        more, result = run(loader(), tmp_path / "more", max_steps=9, resume=result.last_checkpoint)
    counts = seen.counts + more.counts
    assert [row["samples"] for row in result.tables["mixture"]] == [counts[1.0], counts[3.0]]


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_what_it_cannot_watch_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"watches the sources of an engine\.Mixture, and the training data has none"):
        run(DataLoader(Rows(1.0, 8), batch_size=4), tmp_path, net=Quiet, max_steps=1)
    stream = DataLoader(Mixture({"web": RowStream(1.0, 40)}, {"web": 1}), batch_size=4)
    with pytest.raises(ValueError, match=r"from the batches, which do not tell the source: give Mixture\(source_key"):
        run(stream, tmp_path, net=Quiet, max_steps=1)

    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.weight * 1.0, "losses": torch.ones(3)}

    with pytest.raises(ValueError, match=r"losses of shape \(3,\) for 4 samples: give one loss for each sample"):
        run(DataLoader(data(source_key="source"), batch_size=4), tmp_path, net=Wrong, max_steps=1)
