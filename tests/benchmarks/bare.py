"""The loops that everything is compared with: plain PyTorch, as one would write it by hand for each case."""

from __future__ import annotations

import torch
from cases import Contender, Work, loss_of, make_optimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def plain(work: Work) -> nn.Module:
    net = work.build()
    optimizer = make_optimizer(net)
    model = DistributedDataParallel(net) if work.case.ddp else net
    for batch in work.data:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def accumulated(work: Work) -> nn.Module:
    net = work.build()
    optimizer = make_optimizer(net)
    window = work.case.window
    for i, batch in enumerate(work.data, start=1):
        loss = loss_of(net, batch)
        (loss / window).backward()
        if i % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return net


def autocast(work: Work) -> nn.Module:
    net = work.build()
    optimizer = make_optimizer(net)
    for batch in work.data:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net, batch)
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
