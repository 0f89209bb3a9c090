"""``Trainer`` on two ranks over gloo: the weights, metrics and predictions of one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file

sys.path.append(str(Path(__file__).parent))  # on a rank this file is loaded by its path

from both import OURS, data, module, trainer, weights


def trained(folder: Path, strategy: str, per_rank: int) -> dict[str, Any]:
    """Two epochs on batches of 8 samples over all ranks, with the callbacks that most projects have."""
    best = OURS.callbacks.ModelCheckpoint(folder / "best", monitor="val", save_last=True)
    fitted = trainer(
        OURS, folder, strategy=strategy, max_epochs=2, val_check_interval=0.5, num_sanity_val_steps=0, enable_checkpointing=True,
        callbacks=[best, OURS.callbacks.EarlyStopping("val", patience=9)],
    )  # fmt: skip
    net = module(OURS)
    fitted.fit(net, data(batch_size=per_rank), data(batch_size=per_rank))
    found = {name: float(value) for name, value in fitted.callback_metrics.items()}
    fitted.save_checkpoint(folder / "x.ckpt")
    predictions = fitted.predict(net, data(batch_size=per_rank))
    (validated,) = fitted.validate(net, data(batch_size=per_rank), verbose=False)
    return {
        "metrics": found,
        "validated": validated["val"],
        "predictions": torch.cat(predictions).flatten().tolist(),
        "steps": fitted.global_step,
        "world": fitted.world_size,
        "best": Path(best.best_model_path).name,
    }


def two(strategy: str) -> dict[str, Any]:
    return trained(Path(os.environ["TEST_PLACE"]) / strategy, strategy, 4)


def rank_ddp() -> dict[str, Any]:
    return two("ddp_find_unused_parameters_true")


def rank_fsdp() -> dict[str, Any]:
    return two("fsdp")


def rank_refused() -> str:
    with pytest.raises(ValueError, match="presharded = True") as caught:
        trainer(OURS, Path(os.environ["TEST_PLACE"]), strategy="ddp", max_epochs=1, use_distributed_sampler=False).fit(
            module(OURS), data()
        )
    return str(caught.value)


class Even(OURS.LightningModule):
    """Logs in every second of its four steps."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 2 == 0:
            self.log("even", float(10 * self.global_rank + batch_idx), sync_dist=True)
        return (self.w * batch).mean()

    def on_train_epoch_end(self) -> None:
        self.at_the_end = self.trainer.callback_metrics["even"].item()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rank_even() -> list[float]:
    net = Even()
    fitted = trainer(OURS, Path(os.environ["TEST_PLACE"]) / "even", strategy="ddp", max_epochs=1)
    fitted.fit(net, torch.utils.data.DataLoader(torch.ones(8, 1)))
    return [net.at_the_end, fitted.callback_metrics["even"].item()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def found(place: Path) -> Any:
    return ranks_of_file(__file__, 2, TEST_PLACE=str(place))


@pytest.fixture(scope="module")
def one(place: Path) -> dict[str, Any]:
    return trained(place / "one", "auto", 8)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(found: Any, one: dict[str, Any], strategy: str) -> None:
    assert one["steps"] == 10
    for rank in found[strategy]:
        assert rank["world"] == 2
        assert (rank["steps"], rank["best"]) == (one["steps"], one["best"])
        for name in ("metrics", "validated", "predictions"):
            torch.testing.assert_close(rank[name], one[name], rtol=1e-5, atol=1e-6)


def test_one_process_reads_the_file_of_two_ranks(found: Any, one: dict[str, Any], place: Path) -> None:
    load = type(module(OURS)).load_from_checkpoint
    alone = weights(load(place / "one" / "x.ckpt"))
    for folder in ("ddp_find_unused_parameters_true", "fsdp"):
        torch.testing.assert_close(weights(load(place / folder / "x.ckpt")), alone)


def test_a_value_that_not_every_step_logs_is_the_latest_over_all_ranks(found: Any) -> None:
    assert found["even"] == [[7.0, 7.0], [7.0, 7.0]]


def test_loaders_that_are_not_divided_are_refused(found: Any) -> None:
    assert all("on 2 ranks" in text for text in found["refused"])
