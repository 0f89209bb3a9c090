"""The loops that everything is compared with: plain PyTorch, as one would write it by hand for each case."""

from __future__ import annotations

import torch
from cases import Batch, Contender, Work, loss_of, make_optimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Step(nn.Module):
    """The step as a user's class, which is the user's code in a bare loop and in a trainer alike: its cost is on both sides."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)


def plain(work: Work) -> nn.Module:
    net = work.build()
    optimizer = make_optimizer(net)
    step = DistributedDataParallel(Step(net)) if work.case.ddp else Step(net).forward
    for index, batch in enumerate(work.data):
        loss = step(batch, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def accumulated(work: Work) -> nn.Module:
    net = work.build()
    optimizer = make_optimizer(net)
    step, window = Step(net).forward, work.case.window
    for index, batch in enumerate(work.data):
        loss = step(batch, index)
        (loss / window).backward()
        if (index + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net


def autocast(work: Work) -> nn.Module:
    net = work.build()
    optimizer = make_optimizer(net)
    step = Step(net).forward
    for index, batch in enumerate(work.data):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = step(batch, index)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def train(work: Work) -> nn.Module:
    """The bare loop of the case. Logs and callbacks have no bare form: those cases are compared with the plain loop."""
    if work.case.window > 1:
        return accumulated(work)
    if work.case.bf16:
        return autocast(work)
    return plain(work)


def load() -> Contender:
    return Contender("bare", "bare", train, logs=True, callbacks=True)


def load_again() -> Contender:
    """The same loop as one of the contenders: what it seems to cost is the error of the measurement."""
    return Contender("bare again", "bare", train, logs=True, callbacks=True)
