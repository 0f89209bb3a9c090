"""Two ranks that read the same samples, and train on one half of each, are one process that trains on the whole: the two groups of a strategy."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torchmetrics import SumMetric

from callbacks import BasePredictionWriter, ModelCheckpoint, PredictionWriter, ThroughputMonitor, read_predictions
from engine import DDP, FSDP, Callback, Engine, Fit, Loss, Single, Strategy, TrainModule

SAMPLES, LENGTH, WIDTH, BATCH = 22, 8, 6, 4  # an epoch: 6 micro-batches, the last of 2 samples
CLOSE = 1e-6
RANK = int(os.environ.get("RANK", 0))


class SameSamples:
    """All ranks see the same samples, and train on parts of them."""

    def connect(self, group: Any) -> None:
        super().connect(group)  # type: ignore[misc]
        self.data_group, self.loss_group = group.part([[rank] for rank in range(group.world_size)]), group
        self.random_stream = 0


class HalvesDDP(SameSamples, DDP):
    pass


class HalvesFSDP(SameSamples, FSDP):
    pass


class Sequences(Dataset[dict[str, Tensor]]):
    """``noise``: added to each sample, from torch's random numbers. ``odd``: the number of every sample has another dtype on rank 1."""

    def __init__(self, noise: float = 0.0, odd: bool = False) -> None:
        self.x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
        self.noise, self.number = noise, torch.float32 if odd and RANK else torch.int64

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.x[index]
        counts = (torch.arange(LENGTH) < LENGTH // 2 + 1 + index % 3).float()  # the first half has more of them
        x = x + self.noise * torch.rand(x.shape) if self.noise else x
        return {"x": x, "counts": counts, "number": torch.tensor(index, dtype=self.number)}


class Net(TrainModule):
    """Its steps take one of ``parts`` parts of each sample; its batch norm normalises over all of them."""

    def __init__(self, parts: int, weighted: bool = False, optimizer: str = "AdamW") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.into, self.norm, self.out = nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("last_rank", torch.zeros(()))
        self.total, self.val_total = SumMetric(), SumMetric()
        self.not_logged, self.val_not_logged = SumMetric(), SumMetric()
        self.parts, self.weighted, self.optimizer = parts, weighted, optimizer
        self.drawn: list[float] = []
        self.computed: list[float] = []
        self.val_computed: list[float] = []
        self.val_numbers: list[int] = []
        self.ranks_seen: set[float] = set()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(self.into(x).transpose(1, 2)).transpose(1, 2).tanh())[..., 0]
        return y

    def part(self, value: Tensor) -> Tensor:
        """This rank's part of ``[batch, length, ...]``."""
        return value.chunk(self.parts, 1)[RANK % self.parts]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, counts = self.part(batch["x"]), self.part(batch["counts"])
        errors = (self(x) - x.sum(-1).cos()).square()
        self.last_rank.fill_(RANK + 1.0)
        self.drawn.append(float(batch["x"].sum()))
        self.total.update(errors.detach())
        self.not_logged.update(errors.detach())
        self.log("loss", errors.mean(), on_step=True, on_epoch=True)
        self.log(
            "by_count",
            (errors * counts).sum() / counts.sum(),
            on_step=True,
            on_epoch=True,
            batch_size=float(counts.sum()),
        )
        self.log("sum", errors.sum(), on_step=False, on_epoch=True, reduce="sum")
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("other_rank", float(RANK), on_step=False, on_epoch=True, reduce="max", rank_zero_only=True)
        return Loss((errors * counts).sum(), counts.sum()) if self.weighted else errors.mean()

    def on_train_epoch_end(self) -> None:
        self.computed.append(float(self.not_logged.compute()))
        self.not_logged.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        errors = (self(batch["x"]) - batch["x"].sum(-1).cos()).square()
        self.val_numbers += batch["number"].tolist()
        self.ranks_seen.add(float(self.last_rank))
        self.val_total.update(errors)
        self.val_not_logged.update(errors)
        self.log("val_loss", errors.mean())
        self.log("val_total", self.val_total)

    def on_validation_epoch_end(self) -> None:
        self.val_computed.append(float(self.val_not_logged.compute()))
        self.val_not_logged.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.stack([batch["number"].float(), self(batch["x"]).sum(1)])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "LBFGS":
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Watch(Callback):
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.gathered: list[float] = []
        self.after: list[float] = []

    def on_log(self, run: Any, module: Any, metrics: dict[str, float], step: int) -> None:
        rates = [metrics.get(f"throughput/{name}_per_sec", 0.0) for name in ("tokens", "samples")]
        values = {name: value for name, value in metrics.items() if not name.startswith("throughput/")}
        self.logged.append(values | ({"tokens_per_sample": rates[0] / rates[1]} if rates[1] else {}))

    def on_validation_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, *index: int) -> None:
        self.gathered += run.engine.gather_for_metrics(batch["number"]).tolist()

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.after.append(float(torch.rand(())))


def folder() -> Path:
    return Path(os.environ["LOSS_GROUP"])


def train(
    strategy: Any, parts: int, weighted: bool = False, resume: str | None = None, **settings: Any
) -> dict[str, Any]:
    """The facts of a training of three epochs. ``parts``: of each sample, one a rank."""
    module, watch, batch = (
        Net(parts, weighted, settings.pop("optimizer", "AdamW")),
        Watch(),
        settings.pop("batch", BATCH),
    )
    root = settings.pop("root", f"{parts}-{type(strategy).__name__}-{os.environ.get('WORLD_SIZE')}")
    loader = DataLoader(Sequences(settings.pop("noise", 0.0)), batch_size=batch, shuffle=True)
    monitor = ThroughputMonitor(count_flops=False, tokens_fn=lambda batch: module.part(batch["x"])[..., 0].numel())
    fit = Fit(
        strategy=strategy, accelerator="cpu", seed=1, log_every_n_steps=1, num_sanity_val_steps=0, root_dir=folder() / root,
        callbacks=[monitor, watch, *settings.pop("callbacks", ())], **{"max_epochs": 3, "sync_batchnorm": True, **settings},
    )  # fmt: skip
    whole = DataLoader(Sequences(), batch_size=3)
    path = None if resume is None else str(folder() / resume / "checkpoints" / "step=00000009")
    fit.run(module, loader, whole, resume=path)
    return {
        "weights": {name: p.detach().flatten().tolist() for name, p in weights(module).items()},
        "logged": watch.logged, "computed": module.computed, "numbers": module.val_numbers, "gathered": sorted(watch.gathered),
        "ranks_seen": sorted(module.ranks_seen), "drawn": module.drawn, "after": watch.after,
    }  # fmt: skip


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Whole parameters and running statistics."""
    tensors = {name: t for name, t in module.state_dict().items() if name != "last_rank" and "total" not in name}
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "scalar": {},
    "counts": {"weighted": True},
    "scalar windows": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5},
    "count windows": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5, "weighted": True},
    "closure": {"optimizer": "LBFGS", "max_epochs": 1},
}
SHARDED = {"ignore": ["out.*"], "blocks": ["into"]}
"""Settings of FSDP: some parameters are not sharded, and the strategy averages their gradients itself."""


class Rows(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.rows: list[Any] = []

    def write_on_batch_end(self, run: Any, module: Any, prediction: Tensor, batch_indices: Any, *rest: Any) -> None:
        self.rows.append([batch_indices, prediction[0].tolist()])


def predicted(strategy: Any, name: str) -> dict[str, Any]:
    """What ``predict`` returns, and what writers get and write."""
    rows = Rows()
    writer = PredictionWriter(folder() / name)
    fit = Fit(strategy=strategy, accelerator="cpu", callbacks=[rows, writer], seed=1, root_dir=folder() / "predict")
    outputs = fit.predict(Net(1), DataLoader(Subset(Sequences(), range(18)), batch_size=3))
    return {
        "outputs": [out.tolist() for out in outputs],
        "rows": rows.rows,
        "written": [out.tolist() for out in read_predictions(folder() / name)],
    }


def saving() -> list[Callback]:
    return [ModelCheckpoint(every="9 steps", save_top_k=-1, save_last=False)]


# -- what runs on each of two ranks ---------------------------------------------------------------------------------------------------


def rank_trained() -> dict[str, Any]:
    return {name: train(HalvesDDP(), 2, **settings) for name, settings in SETTINGS.items()}


def rank_sharded() -> dict[str, Any]:
    return {name: train(HalvesFSDP(**SHARDED), 2, **SETTINGS[name]) for name in ("scalar", "count windows")}


def rank_validated() -> dict[str, Any]:
    fit = Fit(strategy=HalvesDDP(), accelerator="cpu", seed=1, root_dir=folder() / "validate")
    module = Net(2)
    values = fit.validate(module, DataLoader(Sequences(), batch_size=3))[0]
    return {"values": values, "numbers": module.val_numbers, "computed": module.val_computed}


def rank_predicted() -> dict[str, Any]:
    return predicted(HalvesDDP(), "written by two")


def rank_resumed() -> dict[str, Any]:
    train(HalvesDDP(), 2, callbacks=saving(), root="halves")
    train(DDP(), 1, callbacks=saving(), root="ddp", batch=BATCH // 2)
    return {
        "halves to halves": train(HalvesDDP(), 2, resume="halves", root="again"),
        "single to halves": train(HalvesDDP(), 2, resume="single", root="again"),
        "ddp to halves": train(HalvesDDP(), 2, resume="ddp", root="again"),
    }


def rank_augmented() -> dict[str, Any]:
    return train(HalvesDDP(), 2, noise=0.1, max_epochs=1)


def rank_by_a_loop() -> dict[str, list[float]]:
    """Weights after a step of a loop with Engine whose backward pass is the user's own, and with micro-batches without a loss."""
    return {"backward_by": by_own_backward(HalvesDDP(), 2), "without a loss": without_losses(HalvesDDP(), 2)}


def by_own_backward(strategy: Strategy, parts: int) -> list[float]:
    engine = Engine(strategy=strategy, accelerator="cpu", seed=1)
    module = Net(parts)
    model, optimizer = engine.prepare(module.out, torch.optim.SGD(module.out.parameters(), lr=0.1))
    counts = torch.arange(1.0, LENGTH + 1)[None, :]
    inputs = torch.linspace(-1.0, 1.0, LENGTH * 8).view(1, LENGTH, 8)
    with engine.accumulate(model):
        errors = model(module.part(inputs))[..., 0].square() * module.part(counts)
        engine.backward_by(Loss(errors.sum(), module.part(counts).sum()), lambda root: root.backward())
        optimizer.step()
    values = [value for p in module.out.parameters() for value in p.detach().flatten().tolist()]
    engine.release()
    return values


class Silent(TrainModule):
    """Without a loss on any rank in micro-batch 0, and on rank 1 in the whole second window."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 0 or (RANK == 1 and batch_idx >= 2) else self.weight * batch.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def without_losses(strategy: Strategy, parts: int) -> list[float]:
    module = Silent()
    fit = Fit(
        strategy=strategy, accelerator="cpu", accumulate_grad_batches=2, max_epochs=1, root_dir=folder() / "silent"
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "training_step returned None")
        result = fit.run(module, [torch.full((2,), value) for value in (1.0, 2.0, 3.0, 5.0)])
    return [module.weight.item(), float(result.step)]


def rank_checked() -> dict[str, str]:
    """The error of ``check=True`` when ranks that see the same samples differ."""
    texts = {}
    for name, module, odd in (("optimizers", Differing(2), False), ("first batches", Net(2), True)):
        fit = Fit(strategy=HalvesDDP(), accelerator="cpu", check=True, max_epochs=1, root_dir=folder() / "checked")
        try:
            fit.run(module, DataLoader(Sequences(odd=odd), batch_size=BATCH))
        except Exception as error:
            texts[name] = str(error)
    return texts


class Differing(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2 * (1 + RANK))


class Apart(DDP):
    """Sets its groups after the base class, as strategies of third parties do; ``losses``: also the group of losses."""

    losses: str = ""

    def connect(self, group: Any) -> None:
        super().connect(group)
        alone = group.part([[rank] for rank in range(group.world_size)])
        self.data_group = group if self.losses == "alone" else alone
        if self.losses:
            self.loss_group = alone if self.losses == "alone" else group


def rank_groups() -> dict[str, Any]:
    strategy = Apart()
    engine = Engine(strategy=strategy, accelerator="cpu")
    facts: dict[str, Any] = {"follows": engine.loss_group is engine.data_group, "ranks": engine.loss_group.ranks}
    strategy.losses = "all"
    facts["set"] = Engine(strategy=strategy, accelerator="cpu").loss_group.ranks
    strategy.losses = ""
    facts["set again"] = Engine(strategy=strategy, accelerator="cpu").loss_group.ranks
    strategy.losses = "alone"
    try:
        Engine(strategy=strategy, accelerator="cpu")
    except ValueError as error:
        facts["error"] = str(error)
    return facts


# -- the tests ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("loss_group")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOSS_GROUP", str(root))
        train(Single(), 1, callbacks=saving(), root="single")
        values = ranks_of_file(__file__, 2, LOSS_GROUP=str(root))
        yield values


def is_close(value: Any, expected: Any) -> bool:
    """Whether nested values are equal to 1e-6, relative to values above 1."""
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(is_close(value[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(value) == len(expected) and all(itertools.starmap(is_close, zip(value, expected, strict=True)))
    return bool(value == pytest.approx(expected, rel=CLOSE, abs=CLOSE))


CASES = [("trained", name) for name in SETTINGS] + [("sharded", name) for name in ("scalar", "count windows")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_halves_of_samples_on_two_ranks_are_one_process(ranks: Any, kind: str, name: str) -> None:
    expected = train(Single(), 1, **SETTINGS[name])
    for facts in (rank[name] for rank in ranks[kind]):
        for what in ("weights", "logged", "computed", "gathered", "ranks_seen"):
            assert is_close(facts[what], expected[what]), (what, facts[what], expected[what])
    logged = [entry["tokens_per_sample"] for entry in expected["logged"] if "tokens_per_sample" in entry]
    assert logged == pytest.approx([LENGTH] * len(logged))
    assert logged


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_validation_deals_whole_samples_to_all_ranks(ranks: Any, kind: str, name: str) -> None:
    first, second = (rank[name]["numbers"] for rank in ranks[kind])
    epochs = SETTINGS[name].get("max_epochs", 3)
    assert sorted(first + second) == sorted([*range(SAMPLES)] * epochs)


def test_an_evaluation_without_training_counts_each_sample_once(ranks: Any) -> None:
    module = Net(1)
    expected = Fit(strategy=Single(), accelerator="cpu", seed=1, root_dir=folder()).validate(
        module, DataLoader(Sequences(), batch_size=3)
    )[0]
    for facts in ranks["validated"]:
        assert is_close(facts["values"], expected)
        assert is_close(facts["computed"], module.val_computed)


def test_predictions_have_the_order_of_the_data(ranks: Any) -> None:
    expected = predicted(Single(), "written by one")
    for facts in ranks["predicted"]:
        assert is_close(facts["outputs"], expected["outputs"])
        assert is_close(facts["written"], expected["written"])
        assert all(numbers == indices for indices, numbers in facts["rows"])
    assert sorted(row for facts in ranks["predicted"] for row in facts["rows"]) == expected["rows"]


@pytest.mark.parametrize("name", ["halves to halves", "single to halves", "ddp to halves"])
def test_a_training_continues_on_halves(ranks: Any, name: str) -> None:
    expected = train(Single(), 1)
    for facts in (rank[name] for rank in ranks["resumed"]):
        assert is_close(facts["weights"], expected["weights"])
        assert epochs_of(facts) == pytest.approx(epochs_of(expected)[-len(epochs_of(facts)) :], rel=CLOSE)
    first, second = (rank[name]["after"] for rank in ranks["resumed"])
    assert first == second  # they see the same samples, so they draw the same numbers


def test_one_process_continues_a_training_of_halves(ranks: Any) -> None:
    expected = train(Single(), 1)
    facts = train(Single(), 1, resume="halves", root="again")
    assert is_close(facts["weights"], expected["weights"])
    assert epochs_of(facts) == pytest.approx(epochs_of(expected)[-len(epochs_of(facts)) :], rel=CLOSE)


def epochs_of(facts: dict[str, Any]) -> list[float]:
    """The values of epochs."""
    names = ("loss_epoch", "by_count_epoch", "sum", "total")
    return [entry[name] for entry in facts["logged"] for name in names if name in entry]


def test_ranks_with_the_same_samples_augment_them_alike(ranks: Any) -> None:
    first, second = ranks["augmented"]
    assert first["drawn"] == second["drawn"]


def test_a_backward_pass_of_the_user_has_the_weights_of_all_parts(ranks: Any) -> None:
    expected = by_own_backward(Single(), 1)
    for facts in ranks["by_a_loop"]:
        assert facts["backward_by"] == pytest.approx(expected, abs=CLOSE)


def test_a_micro_batch_without_a_loss_counts_with_a_zero_gradient(ranks: Any) -> None:
    # First window: half of 2. Second: rank 0 has (3 + 5) / 2, rank 1 nothing.
    for facts in ranks["by_a_loop"]:
        assert facts["without a loss"] == pytest.approx([1.0 - 2.0 / 2 - (3.0 + 5.0) / 2 / 2, 2.0])


def test_check_compares_ranks_with_the_same_samples(ranks: Any) -> None:
    for texts in ranks["checked"]:
        assert "the optimizers differ between the ranks" in texts["optimizers"]
        assert "the first batches differ between the ranks" in texts["first batches"]


def test_the_group_of_losses_is_that_of_the_samples_unless_it_is_set(ranks: Any) -> None:
    for rank, facts in enumerate(ranks["groups"]):
        assert facts["follows"]
        assert facts["ranks"] == facts["set again"] == [rank]
        assert facts["set"] == [0, 1]
        assert facts["error"].startswith(f"Apart: data_group has the ranks [0, 1], loss_group [{rank}]; ")
