"""What the updates of an optimizer depend on, found out by trials, and what is said of it where parameters are sharded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from engine import optim
from engine.strategies.update_scope import UpdateScope, check_lent, update_scope, warn_of_matrices


class Unknown(torch.optim.SGD):
    """A class of a user, who scales gradients by ``scale``."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        for grad in grads:
            grad.div_(self.scale(grad, grads))
        super().step()

    def scale(self, grad: Any, grads: list[Any]) -> Any:
        return 2.0


class Normalized(Unknown):
    def scale(self, grad: Any, grads: list[Any]) -> Any:
        return grad.norm()


class Clipped(Unknown):
    """Clips by the norm of all gradients, as some versions of LAMB do."""

    def scale(self, grad: Any, grads: list[Any]) -> Any:
        return torch.nn.utils.get_total_norm(grads).clamp(min=1.0)


class Lamb(Clipped):
    """Has the name of a class that is lent whole tensors."""


class Late(Unknown):
    """Needs the whole matrix, after more steps than the trials take."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step()

    def scale(self, grad: Any, grads: list[Any]) -> Any:
        return grad.norm() if self.count > 6 else 1.0


class Noisy(Unknown):
    def scale(self, grad: Any, grads: list[Any]) -> Any:
        return 1 + torch.rand_like(grad) + random.random()


class Sampling(Unknown):
    """Draws from a generator of its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.generator = torch.Generator()


class Named(Unknown):
    def __init__(self, parameters: Any, names: list[str], lr: float) -> None:
        super().__init__(parameters, lr=lr)


def drawn() -> list[Any]:
    """The states of the random generators."""
    return [torch.get_rng_state().tolist(), random.getstate()]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5))]


def created(cls: Any, **options: Any) -> Optimizer:
    optimizer: Optimizer = cls(parameters(), **{"lr": 0.1, **options})
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "scope"),
    [
        (created(torch.optim.AdamW, foreach=True), UpdateScope.ELEMENT),
        (created(torch.optim.SGD, momentum=0.9), UpdateScope.ELEMENT),
        (created(torch.optim.Adafactor), UpdateScope.MATRIX),
        (torch.optim.Muon([nn.Parameter(torch.zeros(3, 2))]), UpdateScope.MATRIX),
        (created(Unknown), UpdateScope.ELEMENT),
        (created(Normalized), UpdateScope.MATRIX),
        (created(Clipped), UpdateScope.ALL),
        (created(Late), UpdateScope.ELEMENT),
        (created(Noisy), UpdateScope.UNKNOWN),
        (created(Sampling), UpdateScope.UNKNOWN),
        (created(Named, names=[]), UpdateScope.UNKNOWN),
        (torch.optim.LBFGS(parameters()), UpdateScope.UNKNOWN),
    ],
)
def test_trials(optimizer: Optimizer, scope: UpdateScope) -> None:
    before, groups = drawn(), [dict(group) for group in optimizer.param_groups]
    assert update_scope(optimizer) is scope
    assert drawn() == before
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert not optimizer.state
    assert all(p.grad is None and not p.any() for group in groups for p in group["params"])


def test_an_unknown_class_that_needs_whole_matrices_is_a_warning_where_it_steps_shards() -> None:
    with pytest.warns(
        UserWarning, match=r"Normalized seems to treat each tensor as a whole.*engine\.optim\.whole\(Normalized\("
    ):
        warn_of_matrices(created(Normalized))
    for silent in (created(Unknown), created(Clipped), created(torch.optim.AdamW), created(torch.optim.Adafactor)):
        warn_of_matrices(silent)


def test_what_needs_all_tensors_is_not_lent_them_one_by_one() -> None:
    with pytest.raises(
        ValueError, match=r"Lamb needs whole tensors.*depends on the gradients of others.*gradient_clip_val"
    ):
        check_lent(created(Lamb))
    with pytest.warns(UserWarning, match=r"engine\.optim\.whole\(Clipped\): the update of a tensor also depends on"):
        check_lent(optim.whole(created(Clipped)))
    for silent in (optim.whole(created(Normalized)), optim.whole(created(Noisy)), created(torch.optim.Adafactor)):
        check_lent(silent)
