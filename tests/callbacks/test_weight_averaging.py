"""``WeightAveraging``, ``EMA`` and ``SWA``: against closed forms, in validation, in checkpoints, after a resume, on two ranks."""

from __future__ import annotations

import math
import re
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, get_ema_avg_fn

from callbacks import EMA, SWA, ModelCheckpoint, WeightAveraging
from engine import Callback, TrainModule

STEPS = 6  # batches of an epoch


class Net(TrainModule):
    """A linear layer with batch norm; ``seen`` has its weights after each step."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.layer, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.seen: list[Tensor] = []
        self.validated: list[Tensor] = []
        self.rates: list[float] = []

    def forward(self, batch: Tensor) -> Tensor:
        return self.norm(self.layer(batch))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return (self(batch) - batch.sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated.append(self.layer.weight.detach().clone())
        self.log("mean", self(batch).mean())

    test_step = validation_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.layer.weight.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@pytest.fixture
def data() -> list[Tensor]:
    return [torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i in range(STEPS)]


def same(first: nn.Module, second: nn.Module) -> bool:
    there = second.state_dict()
    return all(torch.equal(value, there[name]) for name, value in first.state_dict().items())


# -- the averages ---------------------------------------------------------------------------------------------------------------------


def test_ema_is_its_closed_form(make_fit, data):
    module, ema = Net(), EMA(0.8)
    make_fit(callbacks=[ema], max_epochs=2).run(module, data)
    n, seen = len(module.seen), [weight.double() for weight in module.seen]
    expected = 0.8 ** (n - 1) * seen[0] + sum(0.2 * 0.8 ** (n - 1 - k) * seen[k] for k in range(1, n))
    assert n == ema.n_averaged == 2 * STEPS
    torch.testing.assert_close(module.layer.weight.detach().double(), expected, rtol=1e-6, atol=1e-7)


def by_hand(seen: list[Tensor], chosen: list[int], decay: Any) -> Tensor:
    average = seen[chosen[0]].double()
    for n, step in enumerate(chosen[1:], start=1):
        average = decay(n) * average + (1 - decay(n)) * seen[step].double()
    return average


@pytest.mark.parametrize(
    ("options", "chosen", "decay"),
    [
        ({"update_every_n_steps": 4}, [0, 4, 8], lambda n: 0.9),
        ({"update_starting_at_step": 7}, [7, 8, 9, 10, 11], lambda n: 0.9),
        ({"update_starting_at_epoch": 1, "update_every_n_steps": 3}, [6, 9], lambda n: 0.9),
        ({"warmup": True}, list(range(12)), lambda n: min(0.9, (1 + n) / (10 + n))),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_when_ema_updates(make_fit, data, options, chosen, decay):
    module = Net()
    make_fit(callbacks=[EMA(0.9, **options)], max_epochs=2).run(module, data)
    expected = by_hand(module.seen, chosen, decay)
    torch.testing.assert_close(module.layer.weight.detach().double(), expected, rtol=1e-6, atol=1e-7)


def test_only_steps_that_happened_count(make_fit, data):
    data[3] = torch.full((5, 3), math.nan)
    module, ema = Net(), EMA(0.5, use_buffers=False)
    result = make_fit(callbacks=[ema], on_nonfinite="skip").run(module, data)
    seen = [module.seen[i] for i in (0, 1, 2, 4, 5)]
    assert result.step == ema.n_averaged == 5
    torch.testing.assert_close(module.layer.weight.detach().double(), by_hand(seen, list(range(5)), lambda n: 0.5))

    ema = EMA(0.5)
    result = make_fit(callbacks=[ema], accumulate_grad_batches=4).run(Net(), data[:3] + data[4:])
    assert result.step == ema.n_averaged == 2


def test_swa_is_a_hand_written_average_with_torchs_schedule(make_fit, data):
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module = Scheduled()
    make_fit(callbacks=[SWA(0.02, 3, annealing_epochs=2)], max_epochs=6).run(module, data)
    ends = [module.seen[STEPS * epoch - 1].double() for epoch in (3, 4, 5, 6)]
    torch.testing.assert_close(module.layer.weight.detach().double(), sum(ends) / 4, rtol=1e-6, atol=1e-7)

    before = 0.1 * 0.98 ** (2 * STEPS)
    bare = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=before)
    schedule, expected = SWALR(bare, 0.02, anneal_epochs=2), []
    for _ in range(4):
        expected += [bare.param_groups[0]["lr"]] * STEPS
        bare.step()
        schedule.step()
    assert module.rates[2 * STEPS :] == pytest.approx(expected)


def test_a_mean_of_ones_own(make_fit, data):
    class Odd(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx % 2 == 1

    module, other = Net(), Net()
    make_fit(callbacks=[Odd()]).run(module, data)
    torch.testing.assert_close(module.layer.weight.detach(), sum(module.seen[1::2]) / 3)
    make_fit(callbacks=[WeightAveraging(avg_fn=get_ema_avg_fn(0.5))]).run(other, data)
    torch.testing.assert_close(
        other.layer.weight.detach().double(), by_hand(other.seen, list(range(STEPS)), lambda n: 0.5)
    )


def test_buffers_and_half_precision(make_fit, data):
    averaged, copied, plain = Net(), Net(), Net()
    for module, callbacks in ((averaged, [EMA(0.9)]), (copied, [EMA(0.9, use_buffers=False)]), (plain, [])):
        make_fit(callbacks=callbacks).run(module, data)
    assert torch.equal(copied.norm.running_mean, plain.norm.running_mean)
    assert not torch.equal(averaged.norm.running_mean, plain.norm.running_mean)
    assert averaged.norm.num_batches_tracked == STEPS

    class Look(Callback):
        kinds: list[Any] = []

        def on_train_end(self, run, module):
            self.kinds.append(ema.other_weights(run, module)["ema"]["layer.weight"].dtype)

    module, ema = Net(), EMA(0.99)
    make_fit(callbacks=[ema, Look()], precision="bf16-true").run(module, [batch.bfloat16() for batch in data])
    assert Look.kinds == [torch.float32]
    expected = by_hand(module.seen, list(range(STEPS)), lambda n: 0.99).bfloat16()
    torch.testing.assert_close(module.layer.weight.detach(), expected, rtol=1e-2, atol=1e-3)
    assert module.layer.weight.dtype == torch.bfloat16


# -- where they are used --------------------------------------------------------------------------------------------------------------


def test_validation_has_the_averages_and_training_its_weights(make_fit, data):
    module, plain = Net(), Net()
    make_fit(callbacks=[EMA(0.7)], val_every=2).run(module, data, data[:1])
    make_fit(val_every=2).run(plain, data, data[:1])
    for step, weight in zip((1, 3, 5), module.validated, strict=True):
        expected = by_hand(module.seen, list(range(step + 1)), lambda n: 0.7)
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)
    assert all(map(torch.equal, module.seen, plain.seen))  # the training is as without


def test_an_error_in_validation_leaves_the_trained_weights(make_fit, data):
    class Fails(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            raise ArithmeticError("here")

    module = Fails()
    with pytest.raises(ArithmeticError, match="here"):
        make_fit(callbacks=[EMA(0.7), ModelCheckpoint()]).run(module, data, data[:1])
    assert torch.equal(module.layer.weight, module.seen[-1])


def test_ctrl_c_in_validation_saves_the_trained_weights(make_fit, data, tmp_path):
    class Interrupted(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if len(self.seen) == 3 and batch_idx == 1:
                signal.raise_signal(signal.SIGINT)

    module, checkpoint, whole, other = Interrupted(), ModelCheckpoint(), Net(), Net()
    with pytest.raises(KeyboardInterrupt):
        make_fit(callbacks=[EMA(0.7), checkpoint], val_every=3).run(module, data, data)
    saved = tmp_path / "checkpoints" / checkpoint.names[3]
    assert torch.equal(Net.load_from_checkpoint(saved, weights="trained").layer.weight, module.seen[-1])
    assert same(Net.load_from_checkpoint(saved, weights="ema"), module)
    make_fit(callbacks=[EMA(0.7)], val_every=3, root_dir=tmp_path / "whole").run(whole, data, data)
    make_fit(callbacks=[EMA(0.7)], val_every=3, root_dir=tmp_path / "again").run(other, data, data, resume=saved)
    assert same(other, whole)


def test_a_save_during_validation_is_an_error(make_fit, data):
    class Saves(Callback):
        def on_validation_epoch_end(self, run, module):
            run.save_checkpoint()

    with pytest.raises(RuntimeError, match="during the validation of EMA's averages"):
        make_fit(callbacks=[EMA(0.7), Saves()]).run(Net(), data, data[:1])


def test_two_averages(make_fit, data):
    module = Net()
    result = make_fit(callbacks=[EMA(0.7), EMA(0.2, name="fast"), ModelCheckpoint()]).run(module, data, data[:1])
    for name, decay in (("ema", 0.7), ("fast", 0.2)):
        saved = Net.load_from_checkpoint(result.last_checkpoint, weights=name)
        expected = by_hand(module.seen, list(range(STEPS)), lambda n, decay=decay: decay)
        torch.testing.assert_close(saved.layer.weight.detach().double(), expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(
        module.validated[0], Net.load_from_checkpoint(result.last_checkpoint, weights="ema").layer.weight
    )


# -- checkpoints ----------------------------------------------------------------------------------------------------------------------


def test_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(make_fit, data, tmp_path):
    def callbacks() -> list[Callback]:
        return [
            SWA(0.02, 2, annealing_epochs=2),
            EMA(0.8, name="slow"),
            ModelCheckpoint(every="4 steps", save_top_k=-1),
        ]

    module, other = Net(), Net()
    whole = make_fit(callbacks=callbacks(), max_epochs=3).run(module, data, data[:1])
    middle = whole.last_checkpoint.parent / "step=00000016"
    again = make_fit(callbacks=callbacks(), max_epochs=3, root_dir=tmp_path / "again")
    end = again.run(other, data, data[:1], resume=middle)
    assert end.step == whole.step == 3 * STEPS
    assert same(module, other)
    for name in ("swa", "slow"):
        assert same(
            *(Net.load_from_checkpoint(path, weights=name) for path in (whole.last_checkpoint, end.last_checkpoint))
        )


def test_a_checkpoint_saved_before_the_update_of_its_step(make_fit, data, tmp_path):
    class First(Callback):
        def on_train_batch_end(self, run, module, outputs, batch, batch_idx):
            if run.step == 4:
                self.path = run.save_checkpoint(asynchronous=True)

    first, module, other = First(), Net(), Net()
    make_fit(callbacks=[first, EMA(0.8)]).run(module, data)
    make_fit(callbacks=[EMA(0.8)], root_dir=tmp_path / "again").run(other, data, resume=first.path)
    assert same(module, other)


def test_the_best_are_the_averages_that_were_validated(make_fit, data):
    class Rises(Net):
        def on_validation_epoch_end(self) -> None:
            self.log("score", float(self.current_epoch == 1))

    callbacks = [EMA(0.8), ModelCheckpoint(monitor="score", mode="max", every="1 epochs")]
    module = Rises()
    result = make_fit(callbacks=callbacks, max_epochs=3, reload_best=True).run(module, data, data[:1])
    assert (result.best_checkpoint.name, result.best_weights) == ("step=00000012", "ema")
    assert torch.equal(module.layer.weight, module.validated[1])
    late = [EMA(0.8, update_starting_at_epoch=2), ModelCheckpoint(monitor="score", mode="max", every="1 epochs")]
    make_fit(callbacks=late, max_epochs=3, reload_best=True).run(module := Rises(), data, data[:1])
    assert torch.equal(module.layer.weight, module.seen[2 * STEPS - 1])  # there was no average yet


def test_a_run_resumes_without_the_callback_and_with_a_new_one(make_fit, data, tmp_path, caplog):
    result = make_fit(callbacks=[EMA(0.8), ModelCheckpoint()]).run(Net(), data)
    make_fit(max_epochs=2, root_dir=tmp_path / "without").run(Net(), data, resume=result.last_checkpoint)
    assert "EMA[name='ema']" in caplog.text
    module, new = Net(), EMA(0.5, name="new")
    make_fit(callbacks=[new], max_epochs=2, root_dir=tmp_path / "new").run(module, data, resume=result.last_checkpoint)
    expected = by_hand(module.seen, list(range(STEPS)), lambda n: 0.5)
    torch.testing.assert_close(module.layer.weight.detach().double(), expected, rtol=1e-6, atol=1e-7)


# -- arguments ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMA(1.5), "EMA(decay=1.5): it must be a number from 0 to 1"),
        (lambda: EMA(update_every_n_steps=0), "EMA(update_every_n_steps=0)"),
        (lambda: EMA(name="a/b"), "EMA(name='a/b'): it must be text without '/'"),
        (lambda: EMA(name="trained"), "EMA(name='trained'): it must be text without '/', and not 'trained'"),
        (lambda: WeightAveraging(avg_fn=max, multi_avg_fn=max), "give avg_fn or multi_avg_fn, not both"),
        (lambda: SWA(-1.0), "SWA(swa_lrs=-1.0)"),
        (lambda: SWA(0.1, 0), "SWA(swa_epoch_start=0)"),
        (lambda: SWA(0.1, 1.5), "SWA(swa_epoch_start=1.5)"),
        (lambda: SWA(0.1, annealing_strategy="exp"), "SWA(annealing_strategy='exp')"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("callbacks", "settings", "message"),
    [
        ([EMA(), WeightAveraging(name="ema")], {}, "two callbacks keep averages called 'ema'"),
        ([SWA(0.1, 4)], {"max_epochs": 3}, "is after the last epoch, max_epochs=3"),
        ([SWA(0.1)], {"max_steps": 3}, "is a share of max_epochs"),
        ([SWA([0.1, 0.2], 1)], {}, "2 learning rates, and the optimizers have 1 parameter groups"),
    ],
    ids=range(4),
)
def test_what_is_wrong_before_the_first_step(make_fit, data, callbacks, settings, message):
    module = Net()
    with pytest.raises(ValueError, match=message):
        make_fit(callbacks=callbacks, **settings).run(module, data)
    assert not module.seen
