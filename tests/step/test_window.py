"""The window against plain float64 loops: losses of both kinds, ``None``, several optimizers, accumulation inside and outside its block."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of
from support.toys import Weight, fit, ones
from torch import Tensor, nn

from callbacks import ModelCheckpoint
from engine import Engine, Loss


def engine_of(**settings: Any) -> Engine:
    return Engine(**{"accelerator": "cpu", **settings})


def unit(engine: Engine, lr: float = 1.0) -> tuple[nn.Module, Any]:
    """``model(x) = w * x`` with ``w = 0``, and SGD."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return engine.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))


def filled(value: float, size: int = 1) -> Tensor:
    return torch.full((size, 1), value)


# -- zeroing without a step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_clip_then_zero_without_a_step(precision: str, by_hand: bool) -> None:
    engine = engine_of(precision=precision)
    model, optimizer = unit(engine)
    for value, steps in ((1.0, False), (0.5, True)):
        engine.backward(model(filled(value, 4)).mean())
        engine.clip_grad_norm_(model.parameters(), 1.0)
        if steps:
            optimizer.step()
        if by_hand:
            model.zero_grad()
        else:
            optimizer.zero_grad()
    assert model.weight.item() == -0.5


def test_counts_of_a_window_that_was_zeroed_are_gone() -> None:
    for by_hand in (False, True):
        engine = engine_of()
        model, optimizer = unit(engine)
        engine.backward(Loss(model(filled(1.0, 6)).sum(), 6))
        if by_hand:
            model.zero_grad()
        else:
            optimizer.zero_grad()
        engine.backward(Loss(model(filled(3.0, 2)).sum(), 2))
        optimizer.step()
        assert model.weight.item() == -3.0


def test_a_backward_pass_onto_unscaled_gradients_is_an_error() -> None:
    engine = engine_of(precision="16-mixed")
    (a, first), (b, second) = unit(engine), unit(engine)
    engine.backward(a(filled(0.5, 4)).mean())
    engine.clip_grad_norm_(a.parameters(), 10.0)
    engine.backward(b(filled(0.25, 4)).mean())  # of others: nothing is mixed
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()
    assert [a.weight.item(), b.weight.item()] == [-0.5, -0.25]
    engine.backward(a(filled(0.5, 4)).mean())
    engine.clip_grad_norm_(a.parameters(), 10.0)
    with pytest.raises(RuntimeError, match=r"added to gradients of SGD that were clipped, unscaled or divided already"):
        engine.backward(a(filled(0.5, 4)).mean())


def test_at_a_boundary_gradients_may_be_zeroed_without_a_step() -> None:
    engine = engine_of(accumulate_grad_batches=2)
    model, optimizer = unit(engine)
    for i in range(4):
        with engine.accumulate(model):
            engine.backward(model(filled(float(i))).mean())
            if i == 3:
                optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == -2.5


# -- None -------------------------------------------------------------------------------------------------------------------------


class Sometimes(Weight):
    """Quadratic loss ``mean((w - x)**2) / 2`` of a batch; ``None`` for the batches in ``left_out``."""

    def __init__(self, left_out: set[int], weighted: bool) -> None:
        super().__init__()
        self.left_out, self.weighted = left_out, weighted

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx in self.left_out:
            return None
        errors = (self.w - batch).square() / 2
        return Loss(errors.sum(), len(batch)) if self.weighted else errors.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def bare(batches: list[Tensor], left_out: set[int], window: int) -> float:
    """The weight after an epoch, in float64: each step's gradient is the mean over the samples that had a loss."""
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    for low in range(0, len(batches), window):
        kept = [batches[i] for i in range(low, min(low + window, len(batches))) if i not in left_out]
        if kept:
            ((w - torch.cat(kept).double()).square() / 2).mean().backward()
            with torch.no_grad():
                w -= 0.5 * w.grad  # type: ignore[operator]
            w.grad = None
    return w.item()


@pytest.mark.filterwarnings("ignore:.*returned None for every batch so far")
def test_samples_without_a_loss_do_not_count(tmp_path: Path) -> None:
    rng = random.Random(0)
    cases = [(2, [3, 3, 1, 3], {0, 1, 3})]
    for _ in range(25):
        sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 9))]
        case = rng.randint(1, 4), sizes, {i for i in range(len(sizes)) if rng.random() < 0.5}
        if len(case[2]) < len(sizes):  # else nothing is trained, which is an error
            cases.append(case)
    for window, sizes, left_out in cases:
        batches = [torch.randn(size, 1, generator=torch.Generator().manual_seed(i)) for i, size in enumerate(sizes)]
        for weighted in (False, True):
            module = Sometimes(left_out, weighted)
            fit(tmp_path, accumulate_grad_batches=window, max_epochs=1).run(module, batches)
            assert module.w.item() == pytest.approx(bare(batches, left_out, window), abs=1e-6), (
                window,
                sizes,
                left_out,
                weighted,
            )


# -- several optimizers -----------------------------------------------------------------------------------------------------------


def test_each_model_has_its_own_counts() -> None:
    engine = engine_of(accumulate_grad_batches=2)
    (a, first), (b, second) = unit(engine), unit(engine)
    for value, count in ((1.0, 2), (4.0, 6)):
        with engine.accumulate(a, b):
            engine.backward(Loss(a(filled(value)).sum(), count))
            first.step()
            first.zero_grad()
            engine.backward(Loss(b(filled(10 * value)).sum(), 2 * count))
            second.step()
            second.zero_grad()
    assert [a.weight.item(), b.weight.item()] == pytest.approx([-5 / 8, -50 / 16])


@pytest.mark.parametrize("together", [False, True])
def test_two_backward_passes_then_two_steps(together: bool) -> None:
    engine = engine_of()
    (a, first), (b, second) = unit(engine), unit(engine)
    for _ in range(2):
        engine.backward(Loss(a(filled(3.0)).sum(), 2))
        engine.backward(Loss(b(filled(5.0)).sum(), 4))
        if together:
            engine.step([first, second])
        else:
            first.step()
            second.step()
        first.zero_grad()
        second.zero_grad()
    assert [a.weight.item(), b.weight.item()] == pytest.approx([-3.0, -2.5])


def test_models_may_have_losses_of_different_kinds() -> None:
    engine = engine_of()
    (a, first), (b, second) = unit(engine), unit(engine)
    engine.backward(a(filled(3.0)).mean())
    engine.backward(Loss(b(filled(5.0)).sum(), 4))
    first.step()
    second.step()
    assert [a.weight.item(), b.weight.item()] == pytest.approx([-3.0, -1.25])
    with pytest.raises(TypeError, match="have reached the parameters of one optimizer"):
        engine.backward(Loss(a(filled(1.0)).sum(), 2)) or engine.backward(a(filled(1.0)).mean())


def test_a_loss_that_reaches_two_models_counts_for_both() -> None:
    engine = engine_of()
    (a, first), (b, second) = unit(engine), unit(engine)
    engine.backward(Loss((a(filled(3.0)) + b(filled(5.0))).sum(), 2))
    second.zero_grad()
    engine.backward(Loss(b(filled(8.0)).sum(), 4))
    first.step()
    second.step()
    assert [a.weight.item(), b.weight.item()] == pytest.approx([-1.5, -2.0])


# -- outside the block ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_first", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_step_and_zero_grad_after_the_block(zero_first: bool, prepared: bool) -> None:
    engine = engine_of(accumulate_grad_batches=4)
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, scheduler = engine.prepare(model, plain, torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5))
    batches = [filled(float(i)) for i in range(8)]
    weights, norms = [], []
    for x in engine.prepare_data_loader(batches) if prepared else batches:
        if zero_first:
            optimizer.zero_grad()
        with engine.accumulate(model):
            engine.backward(model(x).mean())
        norms.append(engine.clip_grad_norm_(model.parameters(), 100.0) is not None)
        optimizer.step()
        scheduler.step()
        if not zero_first:
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == pytest.approx([0.0, 0.0, 0.0, -1.5, -1.5, -1.5, -1.5, -1.5 - 5.5 / 2])
    assert norms == [False, False, False, True] * 2
    assert scheduler.get_last_lr() == [0.25]


def test_a_plain_model_beside_one_that_accumulates() -> None:
    engine = engine_of(accumulate_grad_batches=4)
    (a, first), (b, second) = unit(engine), unit(engine)
    found = []
    for i in range(4):
        with engine.accumulate(a):
            engine.backward(a(filled(float(i))).mean())
        engine.backward(b(filled(1.0)).mean())
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
        found.append((a.weight.item(), b.weight.item()))
    assert found == [(0.0, -1.0), (0.0, -2.0), (0.0, -3.0), (-1.5, -4.0)]


def test_a_loop_that_is_left_inside_of_a_window_can_discard_it() -> None:
    engine = engine_of(accumulate_grad_batches=2)
    model, optimizer = unit(engine)
    loader = engine.prepare_data_loader([filled(8.0), filled(2.0)])
    for epoch in range(2):
        for x in loader:
            with engine.accumulate(model):
                engine.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            if not epoch:
                break
        if not epoch:
            engine.discard_window()
    assert model.weight.item() == -5.0


@pytest.mark.parametrize("weighted", [False, True])
def test_minus_one_inside_a_window_leaves_the_window_out(tmp_path: Path, weighted: bool) -> None:
    class Cut(Weight):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            out = self.w * batch
            return Loss(out.sum(), len(batch)) if weighted else out.mean()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    module = Cut()
    result = fit(tmp_path, accumulate_grad_batches=2, max_epochs=2).run(module, ones(4))
    assert (module.w.item(), result.step) == (-3.0, 3)


# -- accuracy ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_64_true_has_the_accuracy_of_float64(weighted: bool, fused: bool) -> None:
    engine = engine_of(precision="64-true", accumulate_grad_batches=3)
    model, expected = (nn.Linear(3, 1).double() for _ in range(2))
    expected.load_state_dict(model.state_dict())
    optimizer, plain = (
        torch.optim.SGD(model.parameters(), lr=0.1, fused=fused),
        torch.optim.SGD(expected.parameters(), lr=0.1),
    )
    model, optimizer = engine.prepare(model, optimizer)
    batches = [
        torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
        for size in (4, 2, 1, 5)
    ]
    for x in engine.prepare_data_loader(batches):
        with engine.accumulate(model):
            errors = model(x).square()
            engine.backward(Loss(errors.sum(), torch.tensor(len(x))) if weighted else errors.mean())
            optimizer.step()
            optimizer.zero_grad()
    for low in (0, 3):
        expected(torch.cat(batches[low : low + 3])).square().mean().backward()
        plain.step()
        plain.zero_grad()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-15)


def test_counts_in_half_formats_are_added_exactly() -> None:
    engine = engine_of(accumulate_grad_batches=4)
    model, optimizer = unit(engine)
    for _ in range(4):
        with engine.accumulate(model):
            engine.backward(Loss(model(filled(257.0)).sum(), torch.tensor(257, dtype=torch.int16).to(torch.float16)))
            optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == -1.0


# -- several ranks ----------------------------------------------------------------------------------------------------------------


class Pattern(Sometimes):
    """Without a loss on (rank, batch) pairs."""

    def __init__(self, left_out: set[tuple[int, int]], kind: str) -> None:
        super().__init__(set(), kind != "scalar")
        self.pairs, self.kind = left_out, kind

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if (self.global_rank, batch_idx) in self.pairs:
            return None
        found = super().training_step(batch, batch_idx)
        if self.kind == "either" and self.global_rank:
            return Loss(found.sum, torch.tensor(found.count))
        return found


class Zeroes(Weight):
    """Clips, and zeroes the first two batches' gradients without a step."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward((self.w * batch).mean())
        self.clip_gradients(optimizer, 1.0)
        if batch_idx >= 2:
            optimizer.step()
        optimizer.zero_grad()


CASES = [
    # window, (rank, micro-batch) without a loss, kind of loss
    (1, {(1, 0)}, "weighted"),
    (1, {(0, 0), (1, 0), (1, 1)}, "weighted"),
    (2, {(1, 0), (1, 1)}, "weighted"),
    (2, {(0, 0), (0, 3)}, "either"),
    (1, {(0, 1), (1, 1)}, "weighted"),
    (1, {(1, 0)}, "scalar"),
    (1, {(0, 0), (1, 0), (0, 2), (1, 2)}, "scalar"),
]


def batches_of(ranks: int = 2, count: int = 4) -> list[Tensor]:
    """Of 2 samples, in the order in which they are dealt to the ranks."""
    return list(torch.randn(2 * ranks * count, 1, generator=torch.Generator().manual_seed(3)).split(2))


def ranks_without_loss() -> Any:
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*returned None")
        for precision in ("32-true", "16-mixed"):
            for window, pairs, kind in CASES:
                module = Pattern(pairs, kind)
                settings = {
                    "devices": "auto",
                    "accumulate_grad_batches": window,
                    "max_epochs": 1,
                    "precision": precision,
                    "strategy": "ddp",
                }
                result = fit("/tmp", **settings).run(module, batches_of())
                found.append([module.w.item(), result.step])
    return found


def ranks_zero() -> Any:
    found = []
    for precision in ("32-true", "16-mixed"):
        module = Zeroes()
        fit("/tmp", devices="auto", max_epochs=1, precision=precision).run(module, batches_of())
        found.append(module.w.item())
    return found


def ranks_engine() -> Any:
    """Two models, each with its own counts; those of the ranks differ, and one has a tensor."""
    engine = engine_of()
    (a, first), (b, second) = unit(engine), unit(engine)
    rank = engine.process_index
    counts = (torch.tensor(2), 3) if rank else (1, 4)
    engine.backward(Loss(a(filled(3.0 + rank)).sum(), counts[0]))
    engine.backward(Loss(b(filled(5.0 + rank)).sum(), counts[1]))
    first.step()
    second.step()
    return [engine.unwrap_model(a).weight.item(), engine.unwrap_model(b).weight.item()]


def ranks_go_on(root: str) -> Any:
    """No rank has a loss in the second step, which a resumed run begins with; the others have."""
    found = []
    for scalar in (True, False):

        def module(scalar: bool = scalar) -> Pattern:
            return Pattern({(0, 1), (1, 1)}, "scalar" if scalar else "weighted")

        folder = Path(root) / str(scalar)
        saver = ModelCheckpoint("1 steps", save_top_k=-1, dirpath=folder, filename="{step}")
        settings = {"devices": "auto", "max_epochs": 1, "strategy": "ddp"}
        fit(root, **settings, callbacks=[saver]).run(module(), batches_of())
        again = fit(root, **settings).run(module(), batches_of(), resume=folder / "1")
        found.append(again.step)
    return found


def ranks_all(root: str) -> Any:
    return {"none": ranks_without_loss(), "zero": ranks_zero(), "engine": ranks_engine(), "again": ranks_go_on(root)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks_of(ranks_all, 2, tmp_path_factory.mktemp("ranks"))


def expected_without_loss(window: int, pairs: set[tuple[int, int]], kind: str) -> list[float]:
    """In float64 on one process. Once there was a scalar loss, samples without one count with a zero gradient; with ``Loss`` they do not."""
    w, steps, batches, scalars = 0.0, 0, [b.double() for b in batches_of()], False
    for low in range(0, 4, window):
        here = [(rank, i, batches[2 * i + rank]) for i in range(low, low + window) for rank in range(2)]
        kept = [batch for rank, i, batch in here if (rank, i) not in pairs]
        if kept:
            count = sum(len(b) for b in kept) if kind != "scalar" else sum(len(b) for _, _, b in here)
            w -= 0.5 * sum(float((w - b).sum()) for b in kept) / count
            scalars = scalars or kind == "scalar"
        steps += bool(kept) or scalars
    return [w, steps]


@pytest.mark.parametrize("number", range(2 * len(CASES)))
def test_a_rank_without_a_loss_takes_part(found: list[Any], number: int) -> None:
    weight, steps = expected_without_loss(*CASES[number % len(CASES)])
    tolerance = 1e-6 if number < len(CASES) else 2e-3
    for rank in found:
        assert rank["none"][number] == [pytest.approx(weight, abs=tolerance), steps]
    assert found[0]["none"][number] == found[1]["none"][number]


def test_whether_a_window_without_a_loss_is_a_step_is_the_same_after_a_resume(found: list[Any]) -> None:
    assert [rank["again"] for rank in found] == [[4, 3]] * 2


def test_ranks_that_zero_without_a_step_stay_equal(found: list[Any]) -> None:
    w = 0.0
    for low in (8, 12):
        gradient = torch.cat(batches_of()[low // 2 : low // 2 + 2]).double().mean().item()
        w -= max(-1.0, min(1.0, gradient))
    assert found[0]["zero"] == found[1]["zero"]
    assert found[0]["zero"] == [pytest.approx(w, abs=1e-5), pytest.approx(w, abs=2e-3)]


def test_counts_of_two_models_on_two_ranks(found: list[Any]) -> None:
    for rank in found:
        assert rank["engine"] == pytest.approx([-7 / 3, -11 / 7])
