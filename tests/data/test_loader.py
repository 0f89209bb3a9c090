"""The prepared loader: epochs, resuming, weights told to the window, and the user's own attributes."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from callbacks import ModelCheckpoint
from engine import CombinedLoader, Engine, Fit, Mixture, TrainModule
from engine.data.loader import BatchTransfer, PreparedLoader, feed_for, in_dataset_order
from engine.step.position import NOT_FROM_LOADER


def prepared(data: Any = None, seed: int = 3, **settings: Any) -> tuple[Engine, PreparedLoader]:
    engine = Engine(accelerator="cpu", seed=seed, **settings)
    return engine, engine.prepare_data_loader(shuffled() if data is None else data)


def shuffled(samples: int = 10, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(samples)), batch_size=batch_size, shuffle=True, **options)  # type: ignore[arg-type]


def read(loader: Any) -> list[list[float]]:
    return [batch.tolist() for batch in loader]


def test_each_pass_is_an_epoch() -> None:
    _, loader = prepared()
    first, second = read(loader), read(loader)
    assert loader.epoch == 1
    assert first != second
    assert (
        sorted(i for batch in first for i in batch) == sorted(i for batch in second for i in batch) == list(range(10))
    )
    loader.set_epoch(0)
    assert read(loader) == first
    assert read(loader) == second
    loader.set_epoch(loader.epoch)  # the usual line of a loop over DistributedSampler
    assert read(loader) == second


def test_an_epoch_left_early_counts() -> None:
    _, loader = prepared()
    for _ in loader:
        break
    read(loader)
    assert loader.epoch == 1


def test_the_first_batch_can_be_seen_between_two_passes() -> None:
    _, loader = prepared()
    _, other = prepared()
    read(loader), read(other)
    first = loader.first()
    assert first is not None
    rest = read(loader)
    assert rest[0] == first.tolist()
    assert rest == read(other)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(9, 2))


@pytest.mark.parametrize("data", [torch.ones(4, 2), Stream()], ids=["ready batches", "stream"])
def test_worker_processes_end_with_their_pass(data: Any) -> None:
    before = set(active_children())
    _, loader = prepared(DataLoader(data, batch_size=None, num_workers=1), accumulate_grad_batches=2)
    loader.limit = 4
    for number, _ in enumerate(loader):
        assert number or len(set(active_children()) - before) == 1
    assert set(active_children()) == before


def test_resume_goes_on_in_the_middle() -> None:
    _, loader = prepared(accumulate_grad_batches=1)
    loader.set_epoch(2)
    whole = read(loader)
    _, other = prepared()
    other.resume(2, other.stride)
    assert read(other) == whole[1:]
    assert other.epoch == 2
    read(other)
    assert other.epoch == 3
    assert other.skipped == 0


def test_resume_at_the_end_is_an_empty_pass() -> None:
    _, loader = prepared()
    loader.resume(0, 10)
    assert read(loader) == []


def test_another_seed_is_another_order() -> None:
    _, loader = prepared()
    first = read(loader)
    loader.reseed(4)
    loader.set_epoch(0)
    other = read(loader)
    assert first != other
    assert read(prepared(seed=4)[1]) == other


def test_the_window_knows_what_the_batch_weighs() -> None:
    engine, loader = prepared(accumulate_grad_batches=2)
    told = []
    for _ in loader:
        share = engine.window.share
        told.append((share.size, share.divisor, share.last))
    assert told == [(4, 2.0, False), (4, 2.0, True), (2, 1.0, True)]
    assert engine.window.share is NOT_FROM_LOADER


def test_micro_batches_have_their_shares_and_leave_the_window_alone() -> None:
    engine, loader = prepared(accumulate_grad_batches=2)
    told = []
    for _, share in loader.micro_batches():
        assert engine.window.share is NOT_FROM_LOADER
        told.append((share.size, share.divisor, share.last))
    assert told == [(4, 2.0, False), (4, 2.0, True), (2, 1.0, True)]


def test_leaving_early_gives_the_share_back() -> None:
    engine, loader = prepared()
    for _ in loader:
        break
    assert engine.window.share is NOT_FROM_LOADER
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in loader]
    assert engine.window.share is NOT_FROM_LOADER


def test_length_and_limit() -> None:
    _, loader = prepared()
    assert len(loader) == loader.length == 3
    loader.limit = 2
    assert len(loader) == len(read(loader)) == 2
    _, stream = prepared(x for x in range(2))
    with pytest.raises(TypeError, match="generator has no length"):
        len(stream)


def test_the_users_attributes_are_there() -> None:
    own = shuffled()
    own.tokenizer = "mine"  # type: ignore[attr-defined]
    _, loader = prepared(own)
    assert loader.tokenizer == "mine"
    assert loader.dataset is own.dataset
    assert loader.batch_size == 4
    with pytest.raises(AttributeError, match="nothing"):
        loader.nothing  # noqa: B018


def test_a_one_shot_generator_is_an_error_from_the_second_epoch_on() -> None:
    _, loader = prepared(torch.ones(1) for _ in range(3))
    assert len(read(loader)) == 3
    with pytest.raises(
        ValueError,
        match=r"generator yielded no batch in epoch 1: it is empty, or a generator, which can be read only once",
    ):
        read(loader)


@pytest.mark.parametrize("data", [[], iter(())])
def test_empty_data_is_an_error(data: Any) -> None:
    _, loader = prepared(data)
    with pytest.raises(ValueError, match="yielded no batch in epoch 0: it is empty"):
        read(loader)


def test_placing() -> None:
    engine = Engine(accelerator="cpu", precision="bf16-true")
    data = DataLoader(TensorDataset(torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)), batch_size=2)
    ((x, y),) = engine.prepare_data_loader(data)
    assert (x.dtype, y.dtype) == (torch.bfloat16, torch.int64)
    ((x, _),) = engine.prepare_data_loader(data, place=False)
    assert x.dtype == torch.float32


class AddsOne(BatchTransfer):
    def move(self, batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
        return (batch + 1).to(device, dtype)


def test_a_transfer_takes_the_place_of_the_move() -> None:
    engine = Engine(accelerator="cpu", precision="bf16-true")
    loader = engine.prepare_data_loader([torch.ones(1)])
    loader.transfer = AddsOne()
    assert [(x.item(), x.dtype) for x in loader] == [(2.0, torch.bfloat16)]
    assert loader.skipping(0).transfer is loader.transfer


def test_evaluation_has_windows_of_its_own() -> None:
    engine, loader = prepared(accumulate_grad_batches=4)
    loader.window_size = 1
    assert [engine.window.share.last for _ in loader] == [True] * 3
    assert loader.stride == 4


# -- the place in an epoch ---------------------------------------------------------------------------------------------------------


def test_state_dict_at_every_moment() -> None:
    _, loader = prepared(shuffled(20), accumulate_grad_batches=2)
    assert loader.state_dict() == {"epoch": 0, "position": 0, "stream": None}
    places = [loader.state_dict()["position"] for _ in loader]
    assert places == [0, 8, 8, 16, 24]  # at the newest window's end; the last window has one micro-batch
    assert loader.state_dict() == {"epoch": 1, "position": 0, "stream": None}
    loader.resume(3, 8)
    assert loader.state_dict() == {"epoch": 3, "position": 8, "stream": None}
    batches = iter(loader)
    next(batches), next(batches)
    assert loader.state_dict() == {"epoch": 3, "position": 16, "stream": None}
    loader.set_epoch(4)
    assert loader.state_dict() == {"epoch": 4, "position": 0, "stream": None}


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_raw_loop_goes_on_where_it_was(window: int) -> None:
    _, loader = prepared(shuffled(20), accumulate_grad_batches=window)
    whole = [read(loader), read(loader)]
    for place in range(5):
        _, first = prepared(shuffled(20), accumulate_grad_batches=window)
        read(first)
        batches = iter(first)
        found = [next(batches).tolist() for _ in range(place)]
        state = first.state_dict()
        del batches
        assert first.state_dict() == state  # leaving the loop changes nothing
        _, other = prepared(shuffled(20), accumulate_grad_batches=window)
        other.load_state_dict(state)
        assert read(other) == whole[1][place - place % window :]
        assert found == whole[1][:place]
        assert other.epoch == 1


def test_another_window_after_a_pass_leaves_the_place() -> None:
    engine, loader = prepared(shuffled(20), accumulate_grad_batches=2)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    engine.accumulate_grad_batches = 3
    assert loader.state_dict()["position"] == 16


def test_resuming_takes_no_random_numbers() -> None:
    for data in (shuffled(), [torch.ones(1)] * 3):
        _, loader = prepared(data)
        loader.resume(0, 1)
        before = torch.get_rng_state()
        read(loader)
        assert torch.equal(before, torch.get_rng_state())


def test_skip_first_batches() -> None:
    engine, loader = prepared(shuffled(20))
    whole = [read(loader) for _ in range(3)]
    engine, loader = prepared(shuffled(20))
    skipped = engine.skip_first_batches(loader, 2)
    assert skipped.dataset is loader.dataset
    assert read(skipped) == whole[0][2:]
    assert read(skipped) == whole[1]
    assert read(loader) == whole[1]  # the skipped pass was the loader's first
    assert read(engine.skip_first_batches(loader, 1)) == whole[2][1:]
    loader.set_epoch(0)
    assert read(loader) == whole[0]
    assert read(engine.skip_first_batches(shuffled(20), 3)) == whole[0][3:]
    assert read(engine.skip_first_batches(shuffled(20), 5)) == []
    with pytest.raises(ValueError, match="num_batches=-1 must be 0 or more"):
        engine.skip_first_batches(loader, -1)


@pytest.mark.parametrize("data", [shuffled(20), [torch.full((4,), float(i)) for i in range(5)]])
def test_a_pass_that_skips_is_saved_and_continues(data: Any) -> None:
    _, loader = prepared(data)
    whole = [read(loader) for _ in range(2)]
    _, loader = prepared(data)
    skipping, states = loader.skipping(1), [loader.state_dict()]
    for _ in skipping:
        states.append(loader.state_dict())
    assert [(state["epoch"], state["position"]) for state in states[:-1]] == [
        (0, skipping.stride * (i + 1)) for i in range(len(states) - 1)
    ]
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
    _, again = prepared(data)
    again.load_state_dict(states[1])
    assert read(again) == whole[0][2:]
    next(iter(loader))  # the loader's own passes follow
    assert loader.state_dict()["epoch"] == 1
    again.load_state_dict(loader.state_dict())
    assert read(again) == whole[1][1:]


def test_skipping_keeps_limits_and_goes_on_from_a_resume() -> None:
    engine, loader = prepared(shuffled(20))
    whole = read(loader)
    loader.limit = 4
    loader.resume(0, 4)
    skipped = engine.skip_first_batches(loader, 1)
    assert read(skipped) == whole[2:4]
    assert len(skipped) == 4


def test_skipping_reads_no_sample_of_what_is_skipped() -> None:
    class Counted(Dataset[float]):
        read = 0

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> float:
            self.read += 1
            return float(index)

    data = Counted()
    engine, _ = prepared()
    assert next(iter(engine.skip_first_batches(DataLoader(data, batch_size=2), 400))).tolist() == [800.0, 801.0]
    assert data.read == 2


def test_skipping_in_a_stream_counts() -> None:
    engine, _ = prepared()
    with pytest.warns(UserWarning, match="3 batches are read and discarded"):
        assert read(engine.skip_first_batches((torch.tensor([i]) for i in range(5)), 3)) == [[3], [4]]


class Sequence(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (DataLoader(Sequence()), "SampleFeed"),
        (DataLoader(Sequence(), batch_size=None), "BatchFeed"),
        (DataLoader(Stream()), "StreamFeed"),
        ([torch.zeros(1)], "ListFeed"),
        ((torch.zeros(1),), "ListFeed"),
        ((i for i in range(3)), "StreamFeed"),
        (CombinedLoader([[1], [2]]), "CombinedFeed"),
        (CombinedLoader([[1], range(2)]), "StreamFeed"),
    ],
)
def test_each_kind_of_data_has_its_feed(data: Any, kind: str) -> None:
    assert type(feed_for(data, Engine(accelerator="cpu").group, 0)).__name__ == kind


@pytest.mark.parametrize("data", [3, None, object()])
def test_data_that_cannot_be_iterated(data: Any) -> None:
    with pytest.raises(TypeError, match=f"a loader must be iterable.*got {type(data).__name__}"):
        feed_for(data, Engine(accelerator="cpu").group, 0)


# -- the same batches in every epoch, for ``overfit_batches`` --------------------------------------------------------------------------------

IN_ORDER = pytest.mark.filterwarnings("ignore:overfit_batches. DataLoader is read")
DATA = torch.arange(10.0)


class Reads(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []
        self.validated: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append({k: v.tolist() for k, v in batch.items()} if isinstance(batch, dict) else batch.tolist())
        return self.w * 1.0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.w], lr=1.0)


def run(root: Path, loader: Any, val: Any = None, resume: Any = None, **settings: Any) -> Reads:
    module = Reads()
    Fit(accelerator="cpu", devices=1, root_dir=root, max_epochs=2, num_sanity_val_steps=0, **settings).run(
        module, loader, val, resume=resume
    )
    return module


LOADERS = {
    "shuffled": lambda: DataLoader(DATA, batch_size=2, shuffle=True),
    "weighted": lambda: DataLoader(DATA, batch_size=2, sampler=WeightedRandomSampler([1.0] * 10, 10)),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 2, False)),
    "in order": lambda: DataLoader(DATA, batch_size=2),
    "ready batches": lambda: DataLoader(DATA.reshape(5, 2), batch_size=None, shuffle=True),
    "list": lambda: list(DATA.reshape(5, 2)),
}


@IN_ORDER
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(("given", "count"), [(2, 2), (0.4, 2), (1, 1), (1.0, 5)])
def test_the_first_batches_in_every_epoch(tmp_path: Path, name: str, given: float, count: int) -> None:
    loader = LOADERS[name]()
    before = getattr(loader, "sampler", None)
    module = run(tmp_path, loader, LOADERS[name](), overfit_batches=given)
    assert module.seen == module.validated == 2 * [[2.0 * i, 2.0 * i + 1] for i in range(count)]
    assert getattr(loader, "sampler", None) is before  # the user's loader stays as it is


class Epochs(IterableDataset[Tensor]):
    """A stream with other samples in each epoch, which the loop tells it, or which it counts by its passes."""

    def __init__(self, counts: bool) -> None:
        self.epoch, self.counts = -1 if counts else 0, counts
        if not counts:
            self.set_epoch = lambda epoch: setattr(self, "epoch", epoch)

    def __iter__(self) -> Any:
        self.epoch += self.counts
        return iter(DATA + 100 * self.epoch)


def mixed_streams() -> DataLoader[Any]:
    sources = {"a": Epochs(False), "b": [*DATA]}
    return DataLoader(Mixture(sources, {"a": 0.5, "b": 0.5}), 2)


@pytest.mark.filterwarnings("ignore:this data cannot be read from the middle of an epoch")
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("make", [lambda: DataLoader(Epochs(False), 2), mixed_streams])
def test_a_stream_begins_each_epoch_as_the_first(make: Any, resumed: bool, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"overfit_batches": 3, "seed": 1}
    whole = run(tmp_path / "whole", make(), **limits).seen
    assert len(whole) == 6
    assert whole[:3] == whole[3:]
    if resumed:  # within the second epoch
        stopped = run(tmp_path, make(), callbacks=[ModelCheckpoint()], max_steps=4, **limits)
        rest = run(tmp_path, make(), callbacks=[ModelCheckpoint()], resume="last", **limits)
        assert stopped.seen + rest.seen == whole


def test_a_stream_that_does_not_repeat_itself_is_told_of(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="overfit_batches: DataLoader reads Epochs, a stream, and begins a later epoch"
    ):
        run(tmp_path, DataLoader(Epochs(True), 2), overfit_batches=1)


@IN_ORDER
def test_members_of_a_combination_are_read_in_order(tmp_path: Path) -> None:
    module = run(tmp_path, {"a": LOADERS["shuffled"](), "b": LOADERS["list"]()}, overfit_batches=1)
    assert module.seen == 2 * [{"a": [0.0, 1.0], "b": [0.0, 1.0]}]
    same = CombinedLoader([LOADERS["in order"](), LOADERS["list"]()])
    assert in_dataset_order(same) is same


def test_batches_of_a_class_of_ones_own_are_refused(tmp_path: Path) -> None:
    class Own(BatchSampler):
        pass

    loader = DataLoader(DATA, batch_sampler=Own(RandomSampler(DATA), 2, False))
    with pytest.raises(
        ValueError, match="overfit_batches needs the same batches in every epoch, and Own makes those of DataLoader"
    ):
        run(tmp_path, loader, overfit_batches=1)


def test_runs_without_overfit_batches_are_shuffled(tmp_path: Path) -> None:
    module = run(tmp_path, LOADERS["shuffled"](), seed=1)
    assert module.seen[:5] != module.seen[5:]
    assert sorted(x for batch in module.seen for x in batch) == sorted(2 * DATA.tolist())
