"""What a loss weighs, when its window ends, and the passes over gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.internals import new_share, new_window
from torch import Tensor

from engine import Strategy
from engine.step import gradients
from engine.step.gradients import Loss
from engine.step.window import Window
from engine.utils.parameters import parameters_of


def finish(window: Window) -> Any:
    return window.weights.close(window.weights.states[0])


def weight(value: float = 2.0) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def backward(window: Window, loss: Any, world_size: int = 1, fp16: bool = False) -> None:
    root, divisor = window.weights.weigh(loss, world_size, fp16)
    root.backward(window.weights.seed(divisor, root))


def test_a_full_scalar_micro_batch_is_not_touched() -> None:
    loss = weight() * 3
    root, divisor = new_window().weights.weigh(loss, 1, False)
    assert root is loss
    assert divisor == 1.0


def test_scalar_windows_divide_by_the_share() -> None:
    window, w = new_window(3), weight()
    window.position.accumulating = True
    for size, last in ((4, False), (4, False), (1, True)):  # 9 samples, each micro-batch the mean over its own
        window.begin(new_share(size, 9 / size, 1.0, last))
        backward(window, w * float(size))
    # (4 * 4 + 4 * 4 + 1 * 1) / 9
    assert w.grad is not None
    assert w.grad.item() == pytest.approx(33 / 9, rel=1e-6)
    assert finish(window) is None


def test_without_accumulation_each_micro_batch_is_its_own_window() -> None:
    window = new_window(4)
    window.begin(new_share(4, 4.0, 1.0, last=False))
    assert window.weights.weigh(weight() * 1, 1, False)[1] == 1.0


def test_a_repeated_micro_batch_has_no_gradient() -> None:
    window, w = new_window(), weight()
    window.begin(new_share(0, 1.0, 1.0, last=True))
    backward(window, w * 5)
    assert w.grad is not None
    assert w.grad.item() == 0.0
    window.discard()
    backward(window, Loss(w * 5, 3), world_size=2)
    assert w.grad.item() == 0.0
    assert window.weights.states[0].count == 0.0


@pytest.mark.parametrize("as_tensor", [False, True])
def test_weighted_losses_divide_by_all_items(as_tensor: bool) -> None:
    window, w = new_window(4), weight()
    window.position.accumulating = True
    counts = (3, 17, 1, 40)
    for i, count in enumerate(counts):
        window.begin(new_share(1, 4.0, 1.0, last=i == 3))
        backward(window, Loss(w * float(i + 1) * count, torch.tensor(count) if as_tensor else count))
    total = finish(window)
    assert float(total) == 61.0  # type: ignore[arg-type]
    assert w.grad is not None
    gradients.divide([w.grad], total)  # type: ignore[arg-type]
    # (1 * 3 + 2 * 17 + 3 * 1 + 4 * 40) / 61
    assert w.grad.item() == pytest.approx(200 / 61, rel=1e-6)


def test_a_window_of_one_weighted_loss_is_divided_in_the_graph() -> None:
    window, w = new_window(), weight()
    backward(window, Loss(w * 6.0, 4))
    assert w.grad is not None
    assert w.grad.item() == 1.5
    assert finish(window) is None


def test_two_weighted_losses_on_one_micro_batch() -> None:
    window, w = new_window(), weight()
    backward(window, Loss(w * 6.0, 4))
    backward(window, Loss(w * 10.0, 12))
    total = finish(window)
    assert w.grad is not None
    gradients.divide([w.grad], total)  # type: ignore[arg-type]
    assert w.grad.item() == 1.0  # (6 + 10) / (4 + 12)


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0)])
@pytest.mark.parametrize("size", [1, 2])
def test_no_items_give_zero_gradients(count: Any, size: int) -> None:
    window, w = new_window(size), weight()
    window.position.accumulating = True
    for j in range(size):
        window.begin(new_share(1, float(size), 1.0, last=j == size - 1))
        backward(window, Loss(w * 0.0, count))
    total = finish(window)
    assert w.grad is not None
    if total is not None:
        gradients.divide([w.grad], total)
    assert w.grad.item() == 0.0


def test_a_new_window_begins_with_the_next_backward() -> None:
    window, w = new_window(2), weight()
    window.position.accumulating = True
    window.begin(new_share(1, 2.0, 1.0, last=False))
    backward(window, Loss(w * 1.0, 5))
    backward(window, Loss(w * 1.0, 7))
    assert finish(window) == 12.0
    assert finish(window) == 12.0
    backward(window, Loss(w * 1.0, 2))
    assert window.weights.states[0].count == 2
    assert finish(window) == 2.0


class HasNeighbour(Strategy):
    """The other rank has a count of 5."""

    asked = 0

    def largest(self, values: Sequence[float]) -> list[float]:
        self.asked += 1
        return [max(value, 5.0) for value in values]


def test_fp16_sums_start_small_enough() -> None:
    strategy = HasNeighbour()
    window, w = new_window(2, strategy), weight()
    window.position.accumulating = True
    window.begin(new_share(1, 2.0, 1.0, last=False))
    root, divisor = window.weights.weigh(Loss(w * 8.0, 3), 1, True)
    assert divisor == 16.0  # the power of two above 5 * 2 micro-batches
    root.backward(window.weights.seed(divisor, root))
    window.begin(new_share(1, 2.0, 1.0, last=True))
    backward(window, Loss(w * 12.0, 2), fp16=True)
    total = finish(window)
    assert total == 5 / 16
    assert strategy.asked == 1  # it is agreed already in the second micro-batch
    assert w.grad is not None
    assert w.grad.item() / total == 4.0


def test_kinds_cannot_be_mixed() -> None:
    window, w = new_window(2), weight()
    window.position.accumulating = True
    window.begin(new_share(1, 2.0, 1.0, last=False))
    window.weights.weigh(w * 1, 1, False)
    with pytest.raises(TypeError, match="earlier one of the same window has a scalar"):
        window.weights.weigh(Loss(w * 1, 1), 1, False)
    window.discard()
    window.weights.weigh(Loss(w * 1, 1), 1, False)
    with pytest.raises(TypeError, match=r"earlier one of the same window has Loss\(sum, count\)"):
        window.weights.weigh(w * 1, 1, False)


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (torch.tensor(1.0), ValueError, "has no graph"),
        (Loss(torch.tensor(1.0), 1), ValueError, "has no graph"),
        (1.5, TypeError, "got float"),
        (torch.ones(2, requires_grad=True) * 2, ValueError, r"shape \(2,\)"),
    ],
)
def test_wrong_losses(loss: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        new_window().weights.weigh(loss, 1, False)


def test_a_loss_of_shape_one_is_taken() -> None:
    root, _ = new_window().weights.weigh(torch.ones(1, 1, requires_grad=True) * 2, 1, False)
    assert root.shape == ()


@pytest.mark.parametrize("divisor", [3.0, 7.0, 61 / 17])
def test_the_seed_divides_as_autograd_does(divisor: float) -> None:
    w, v = torch.tensor(1.2345, requires_grad=True), torch.tensor(1.2345, requires_grad=True)
    (w.exp() / divisor).backward()
    v.exp().backward(new_window().weights.seed(divisor, v))
    assert torch.equal(w.grad, v.grad)  # type: ignore[arg-type]


def test_seeds_are_made_once_and_forgotten_when_many() -> None:
    window, loss = new_window(), torch.ones(())
    assert window.weights.seed(3.0, loss) is window.weights.seed(3.0, loss)
    assert window.weights.seed(math.inf, loss).item() == 0.0
    for i in range(300):
        window.weights.seed(float(i + 1), loss)
    assert len(window.weights._seeds) <= 257


def test_parameters_of_several_optimizers_are_unique() -> None:
    a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    first = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=1)
    second = torch.optim.SGD([b, c], lr=1)
    found = parameters_of([first, second])
    assert [id(p) for p in found] == [id(a), id(b), id(c)]


def grads() -> list[Tensor]:
    return [
        torch.tensor([3.0, 0.0]),
        torch.tensor([0.0, 4.0], dtype=torch.float64),
        torch.tensor([0.0], dtype=torch.bfloat16),
    ]


@pytest.mark.parametrize("divisor", [2.0, torch.tensor(2.0), torch.tensor(2)])
def test_divide(divisor: Any) -> None:
    found = grads()
    gradients.divide(found, divisor)
    assert [g.tolist() for g in found] == [[1.5, 0.0], [0.0, 2.0], [0.0]]
    assert [g.dtype for g in found] == [torch.float32, torch.float64, torch.bfloat16]
    gradients.divide([], divisor)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns although they are asked for
def test_scale_takes_sparse_gradients() -> None:
    sparse = torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True)
    dense = torch.ones(1)
    gradients.scale([dense, sparse], 0.5)
    assert sparse.to_dense().tolist() == [0.0, 1.0, 0.0]
    assert dense.tolist() == [0.5]


@pytest.mark.parametrize(
    ("limit", "divisor"), [(1.0, None), (100.0, None), (1.0, 2.0), (1.0, torch.tensor(2.0)), (100.0, 2.0)]
)
def test_clip_norm_is_torchs(limit: float, divisor: Any) -> None:
    ours = [torch.tensor([3.0, 1.0]), torch.tensor([[0.0, 4.0]])]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in ours]
    for p, g in zip(parameters, ours, strict=True):
        p.grad = g / 2.0 if divisor is not None else g.clone()
    expected = torch.nn.utils.clip_grad_norm_(parameters, limit)
    norm = gradients.clip_norm(ours, torch.nn.utils.get_total_norm(ours), limit, divisor)
    torch.testing.assert_close(norm, expected)
    for p, g in zip(parameters, ours, strict=True):
        torch.testing.assert_close(g, p.grad)


def test_clip_values() -> None:
    found = [torch.tensor([-3.0, 0.25, 3.0])]
    gradients.clip_values(found, 0.5)
    assert found[0].tolist() == [-0.5, 0.25, 0.5]


def test_where_nonfinite() -> None:
    model = torch.nn.Linear(1, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[1.0]]), torch.tensor([math.nan])
    assert gradients.where_nonfinite(model.named_parameters()) == ["bias"]
