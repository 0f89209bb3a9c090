"""Trainings on two simulated devices, one a rank: the numbers of two CPU ranks bit for bit, no race, no wait between log boundaries."""

from __future__ import annotations

import os
from typing import Any

import simulated as sim
import torch
import torch.distributed as dist
from torch import Tensor
from trainings import BOUNDARY, ManualNet, Net, Watch, adamw, batches, folder, sgd, trained

from callbacks import ModelCheckpoint
from engine import Engine, Fit

# The bare DistributedDataParallel waits there too: it agrees on its buckets once, at the second forward.
DDP = ("_pre_forward",)


def _joined() -> None:
    """A group for both devices, as a user may bring it: the library's own is for one."""
    if not dist.is_initialized():
        torch.accelerator.set_device_index(int(os.environ["RANK"]))
        dist.init_process_group("cpu:gloo,sim:simccl")


def _trained(accelerator: str, module: Net, data: Any = None, **settings: Any) -> Net:
    settings = {"strategy": "ddp", "devices": 2, "allowed": DDP, **settings}
    return trained(accelerator, module, data, **settings)


def _same(make: Any, data: Any = None, **settings: Any) -> None:
    _joined()
    on_cpu, on_sim = (_trained(accelerator, make(), data, **settings) for accelerator in ("cpu", "sim"))
    assert on_sim.kept[0].device == torch.device("sim", int(os.environ["RANK"]))
    assert on_sim.losses == on_cpu.losses, (on_sim.losses, on_cpu.losses)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(on_sim.weights, on_cpu.weights, strict=True))


def ddp_in_fp32() -> None:
    _same(Net)
    _same(lambda: Net(sgd(foreach=True)), gradient_clip_val=0.1)
    _same(lambda: Net(adamw(foreach=False)), batches(10), accumulate_grad_batches=4, max_epochs=2)


def ddp_in_other_precisions() -> None:
    _same(Net, precision="bf16-mixed", accumulate_grad_batches=2)
    _same(lambda: Net(sgd(foreach=True)), precision="bf16-true")
    _trained("sim", Net(), precision="16-mixed", gradient_clip_val=0.5)


def ddp_with_a_weighted_loss() -> None:
    _same(lambda: Net(weighted=True), batches(12), accumulate_grad_batches=3, gradient_clip_val=0.1)


def ddp_skips_a_step_that_is_not_finite() -> None:
    module = _trained("sim", Net(overflow_at=3), on_nonfinite="skip")
    assert all(torch.isfinite(weight).all() for weight in module.weights)


def ddp_saves_and_resumes() -> None:
    root, data = folder(), batches()
    whole = _trained("sim", Net(dropout=0.3), data, max_steps=10)
    saves = ("save_checkpoint", *DDP)
    _trained(
        "sim",
        Net(dropout=0.3),
        data,
        max_steps=6,
        root_dir=root,
        callbacks=[ModelCheckpoint(every="2 steps")],
        allowed=saves,
    )
    rest = _trained("sim", Net(dropout=0.3), data, max_steps=10, root_dir=root, resume="auto", allowed=saves)
    assert rest.losses == whole.losses[6:], (rest.losses, whole.losses)


def ddp_evaluates_and_predicts() -> None:
    _joined()
    found: dict[str, Any] = {}
    for accelerator in ("cpu", "sim"):
        module = Net()
        fit = Fit(accelerator=accelerator, strategy="ddp", devices=2, log_every_n_steps=BOUNDARY, root_dir=folder())
        fit.run(module, batches(), batches(3))
        predicted = fit.predict(module, batches(4))
        found[accelerator] = (
            fit.validate(module, batches(5)),
            fit.test(module, batches(5)),
            [each.cpu().tolist() for each in predicted],
        )
    assert found["sim"] == found["cpu"], found
    assert sim.races() == []


def ddp_in_manual_optimization() -> None:
    _same(ManualNet)


def fsdp_in_fp32_and_bf16() -> None:
    _joined()
    for precision in ("32-true", "bf16-mixed"):
        for settings in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}):
            watch = Watch()
            losses: dict[str, list[float]] = {}
            for accelerator in ("cpu", "sim"):
                module = Net(adamw(foreach=True))
                Fit(
                    accelerator=accelerator,
                    strategy="fsdp",
                    devices=2,
                    precision=precision,
                    log_every_n_steps=BOUNDARY,
                    callbacks=[watch] if accelerator == "sim" else [],
                    root_dir=folder(),
                    **settings,
                ).run(module, batches())
                losses[accelerator] = module.losses
            torch.testing.assert_close(
                Tensor(losses["sim"]), Tensor(losses["cpu"]), rtol=1e-5 if precision == "32-true" else 2e-2, atol=1e-6
            )
            watch.quiet()


def the_raw_loop_under_ddp() -> None:
    _joined()
    weights: dict[str, list[Tensor]] = {}
    rank = int(os.environ["RANK"])
    for accelerator in ("cpu", "sim"):
        engine = Engine(accelerator=accelerator, strategy="ddp")
        net = Net().net
        net, optimizer = engine.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True))
        for step, (x, y) in enumerate(batches()):
            if step == 3:
                sim.clear()  # buckets are agreed on, capabilities known
            share = slice(2 * rank, 2 * rank + 2)
            loss = (
                (net(x[share].to(engine.device, non_blocking=True)) - y[share].to(engine.device, non_blocking=True))
                .square()
                .mean()
            )
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert sim.races() == []
        assert sim.training_waits() == [], sim.training_waits()
        weights[accelerator] = [parameter.detach().cpu() for parameter in net.parameters()]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights["sim"], weights["cpu"], strict=True))
