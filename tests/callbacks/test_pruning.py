from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from torch import nn
from torch.nn.utils import prune

from callbacks import ModelCheckpoint, Pruning
from engine import Fit, TrainModule


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def data():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(4)]


def by_hand(epochs, amounts, apply):
    """A bare loop with torch's own pruning: the effective weights of its layers."""
    module = Net()
    optimizer = module.configure_optimizers()
    layers = [module.net[0], module.net[2]]
    for epoch in range(epochs):
        if epoch in amounts:
            apply(layers, amounts[epoch])
        for batch in data():
            optimizer.zero_grad()
            module.training_step(batch, 0).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    for layer in layers:
        layer(torch.zeros(1, layer.in_features))  # computes weight from weight_orig and weight_mask
    return [layer.weight.detach() for layer in layers]


def weights(module):
    return [module.net[0].weight.detach(), module.net[2].weight.detach()]


@pytest.fixture
def train(tmp_path):
    def run(module, *callbacks, resume=None, root="run", max_epochs=3, **settings):
        fit = Fit(
            accelerator="cpu",
            devices=1,
            root_dir=tmp_path / root,
            max_epochs=max_epochs,
            callbacks=callbacks,
            **{"gradient_clip_val": 0.5, **settings},
        )
        return fit.run(module, data(), resume=resume)

    return run


def near(found, expected):
    """Equal up to the order of the sum in the norm: torch's pruning registers its parameters in another one."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert same([each == 0 for each in found], [each == 0 for each in expected])


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_equals_torch_pruning_over_all_layers(train):
    module = Net()
    amounts = {0: 0.5, 2: 10}
    train(module, pruning := Pruning(amount=lambda epoch: amounts[epoch], apply_pruning=lambda epoch: epoch in amounts))

    def apply(layers, amount):
        prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=amount)

    near(weights(module), by_hand(3, amounts, apply))
    zeros = sum(int((each == 0).sum()) for each in weights(module))
    assert zeros == 28 + 10  # of 56
    assert pruning.sparsity == pytest.approx(38 / 56)
    assert {name for name, _ in module.named_parameters()} == {name for name, _ in Net().named_parameters()}


def test_equals_torch_pruning_of_channels(train):
    module = Net()
    pruning = Pruning(
        "ln_structured", 2, lambda epoch: epoch == 1, [(module.net[0], "weight")], pruning_dim=0, pruning_norm=1
    )
    train(module, pruning)
    expected = by_hand(3, {1: 2}, lambda layers, amount: prune.ln_structured(layers[0], "weight", amount, n=1, dim=0))
    near(weights(module), expected)
    assert (weights(module)[0].abs().sum(dim=1) == 0).sum() == 2


def test_each_layer_by_itself(train):
    module = Net()
    train(
        module, Pruning(amount=0.25, use_global_unstructured=False, apply_pruning=lambda epoch: epoch < 2), max_epochs=2
    )
    # A quarter of the weights, then a quarter of what is left.
    assert [int((each == 0).sum()) for each in weights(module)] == [12 + 9, 2 + 2]


def test_a_method_of_the_users(train):
    class First(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def __init__(self, amount):
            self.amount = amount

        def compute_mask(self, t, default_mask):
            mask = default_mask.clone()
            mask.view(-1)[: self.amount] = 0
            return mask

    module = Net()
    train(module, Pruning(First, 3, parameters_to_prune=[(module.net[2], "weight")]), max_epochs=2)
    assert module.net[2].weight.flatten().eq(0).tolist() == [True] * 6 + [False] * 2


def test_a_resumed_run_equals_the_uninterrupted_one(train):
    def pruning():
        return Pruning("random_unstructured", amount=0.3)

    whole, first, second = Net(), Net(), Net()
    train(whole, pruning(), root="whole", seed=3)
    train(first, pruning(), ModelCheckpoint(), max_steps=6, seed=3)  # inside the second epoch
    assert train(second, again := pruning(), ModelCheckpoint(), resume="last", seed=3).step == 12
    assert same(weights(second), weights(whole))
    assert 0.6 < again.sparsity < 0.7  # 1 - 0.7 ** 3, and not once more


def test_torch_masks_afterwards(train):
    module = Net()
    train(module, pruning := Pruning(make_permanent=False))
    assert prune.is_pruned(module.net[0])
    assert torch.equal(module.net[0].weight_mask.bool(), pruning.masks["net.0.weight"])
    assert "weight_orig" in dict(module.net[0].named_parameters())


def test_a_second_run_starts_without_masks(train):
    pruning = Pruning(apply_pruning=lambda epoch: epoch == 0, amount=0.5)
    for root in ("a", "b"):
        module = Net()
        train(module, pruning, root=root, max_epochs=1)
        assert sum(int((each == 0).sum()) for each in weights(module)) == 28


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pruning_fn": "l2"}, "pruning_fn='l2'"),
        ({"pruning_fn": "ln_structured", "pruning_norm": 1}, "needs pruning_dim"),
        ({"pruning_fn": "ln_structured", "pruning_dim": 0}, "'ln_structured' needs pruning_norm"),
        (
            {"pruning_fn": "random_structured", "pruning_dim": 0, "use_global_unstructured": True},
            "prunes each parameter",
        ),
        ({"pruning_dim": 0}, "are for structured methods"),
        ({"amount": 1.5}, r"amount=1\.5"),
        ({"amount": -1}, "amount=-1"),
    ],
)
def test_arguments_that_are_not_possible(arguments, message):
    with pytest.raises(ValueError, match=message):
        Pruning(**arguments)


def test_modules_that_cannot_be_pruned(train):
    class ByHand(Net):
        automatic_optimization = False

    with pytest.raises(ValueError, match="automatic_optimization = False"):
        train(ByHand(), Pruning(), gradient_clip_val=None)
    with pytest.raises(ValueError, match="Net has no Linear with the parameter 'weight'"):
        train(Net(), Pruning(parameters_to_prune=[(nn.Linear(2, 2), "weight")]))
    with pytest.raises(ValueError, match="called 'kernel'"):
        train(Net(), Pruning(parameter_names=["kernel"]))
    with pytest.raises(ValueError, match=r"amount=2\.0"):
        train(Net(), Pruning(amount=lambda epoch: 2.0))
    train(Net(), Pruning(), ModelCheckpoint(), max_epochs=1, root="masks")
    module = Net()
    with pytest.raises(ValueError, match=r"masks of net\.0\.weight"):
        train(module, Pruning(parameters_to_prune=[(module.net[2], "weight")]), resume="last", root="masks")


SCRIPT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/callbacks"]
import torch
from callbacks import Pruning
from engine import Fit
from test_pruning import Net, data, weights

module = Net()
torch.manual_seed(int(__import__("os").environ["RANK"]))  # random masks would differ
pruning = Pruning("random_unstructured", amount=0.5)
Fit(accelerator="cpu", strategy="ddp", root_dir=sys.argv[2], max_epochs=2, callbacks=[pruning]).run(module, data())
found = [mask.flatten().tolist() for mask in pruning.masks.values()]
try:
    Fit(accelerator="cpu", strategy="fsdp", root_dir=sys.argv[2], callbacks=[Pruning()]).run(Net(), data())
except ValueError as error:
    refused = str(error)
report([found, [w.flatten().tolist() for w in weights(module)], refused])
"""


def test_two_ranks_have_the_same_masks(tmp_path):
    first, second = (rank.value for rank in run_ranks(SCRIPT, 2, Path(__file__).parents[1], tmp_path))
    assert first == second
    masks, values, refused = first
    assert sum(chosen.count(False) for chosen in masks) == 28 + 14
    for mask, weight in zip(masks, values, strict=True):
        assert all(value == 0 for kept, value in zip(mask, weight, strict=True) if not kept)
    assert "sharded: use strategy='ddp'" in refused
