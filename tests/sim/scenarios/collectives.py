"""The process group of the simulated device, on two ranks: its collectives give the right numbers, in the streams' order."""

from __future__ import annotations

import os
from collections.abc import Callable

import simulated as sim
import torch
import torch.distributed as dist

# torch 2.13 renames them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _joined() -> tuple[int, torch.device]:
    rank = int(os.environ["RANK"])
    device = torch.device("sim", rank)
    torch.accelerator.set_device_index(device)
    dist.init_process_group("cpu:gloo,sim:simccl", device_id=device)
    return rank, device


def _left() -> None:
    assert sim.races() == []
    dist.barrier()
    dist.destroy_process_group()


def every_collective_gives_its_numbers() -> None:
    assert dist.get_default_backend_for_device("sim") == "simccl"
    rank, device = _joined()

    def numbers(*values: float) -> torch.Tensor:
        return torch.tensor(values, device=device)

    mine = numbers(rank + 1.0, 10.0 * (rank + 1))
    for op, expected in (("SUM", [3.0, 30.0]), ("AVG", [1.5, 15.0]), ("MAX", [2.0, 20.0])):
        for dtype in (torch.float32, torch.bfloat16):
            reduced = mine.to(dtype, copy=True)
            dist.all_reduce(reduced, op=getattr(dist.ReduceOp, op))
            assert reduced.tolist() == expected, (op, dtype, reduced)
    reduced = mine.clone()
    dist.reduce(reduced, 1)
    assert reduced.tolist() == [3.0, 30.0] or rank == 0
    shared = mine.clone()
    dist.broadcast(shared, 1)
    assert shared.tolist() == [2.0, 20.0]

    gathered = torch.empty(4, device=device)
    _all_gather(gathered, mine)
    assert gathered.tolist() == [1.0, 10.0, 2.0, 20.0]
    pieces = [torch.empty(2, device=device) for _ in range(2)]
    dist.all_gather(pieces, mine)
    assert torch.cat(pieces).tolist() == gathered.tolist()
    part = torch.empty(2, device=device)
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, 2)):
        _reduce_scatter(part, gathered, op=op)
        assert part.tolist() == [2 * value / divisor for value in gathered[2 * rank : 2 * rank + 2].tolist()]
    dist.reduce_scatter(part, [mine, mine + 1])
    assert part.tolist() == [3.0 + 2 * rank, 30.0 + 2 * rank]

    dist.gather(mine, pieces if rank == 0 else None, 0)
    dist.scatter(part, [numbers(5.0, 6.0), numbers(7.0, 8.0)] if rank == 0 else None, 0)
    assert part.tolist() == ([5.0, 6.0] if rank == 0 else [7.0, 8.0])
    exchanged = torch.empty(2, device=device)
    dist.all_to_all_single(exchanged, mine)
    assert exchanged.tolist() == ([1.0, 2.0] if rank == 0 else [10.0, 20.0])

    if rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(part, 0)
        assert part.tolist() == [1.0, 10.0]
    both = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, part, 1 - rank)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    assert part.tolist() == [2.0 - rank, 10.0 * (2 - rank)]
    one, two = mine.clone(), mine.clone()
    with dist._coalescing_manager(device=device, async_ops=True) as together:
        dist.all_reduce(one)
        dist.all_reduce(two)
    together.wait()
    assert one.tolist() == two.tolist() == [3.0, 30.0]
    _left()


def a_result_that_nobody_waited_for_is_a_race() -> None:
    _, device = _joined()
    pieces: list[Callable[[torch.Tensor], object]] = [
        lambda numbers: dist.all_reduce(numbers, async_op=True),
        lambda numbers: dist.broadcast(numbers, 0, async_op=True),
        lambda numbers: _all_gather(torch.empty(8, device=device), numbers, async_op=True),
    ]
    for begin in pieces:
        numbers = torch.ones(4, device=device)
        work = begin(numbers)
        assert sim.races() == []
        numbers.mul_(2)
        assert sim.races()
        work.wait()  # type: ignore[attr-defined]
        sim.clear()
        numbers.mul_(2)
        assert sim.races() == []
    numbers = torch.ones(4, device=device)
    dist.all_reduce(numbers)  # not asynchronous: in the current stream's order
    numbers.mul_(2)
    _left()


def a_wait_for_a_collective_holds_the_stream_not_the_host() -> None:
    _, device = _joined()
    side, numbers = torch.Stream(device), torch.ones(4, device=device)
    work = dist.all_reduce(numbers, async_op=True)
    with side:
        work.wait()
        numbers.mul_(2)
    assert sim.races() == []
    assert sim.training_waits() == []
    numbers.mul_(2)  # only the other stream has waited
    assert sim.races()
    sim.clear()
    dist.barrier()
    assert [wait.name for wait in sim.waits()] == ["barrier"]
    dist.destroy_process_group()


def memory_of_a_collective_is_not_reused_before_its_end() -> None:
    _, device = _joined()

    def begun() -> dist.Work:
        work = dist.all_reduce(torch.ones(4, device=device), async_op=True)
        assert work is not None
        return work

    work = begun()
    kept = [torch.zeros(4, device=device) for _ in range(2)]  # not in the tensor's memory: the work holds it
    work.wait()
    kept.append(torch.zeros(4, device=device))
    begun()  # dropped without a wait
    kept.append(torch.zeros(4, device=device))
    _left()


def ddp_and_fsdp2_of_torch_have_no_race() -> None:
    from torch.distributed.fsdp import fully_shard

    rank, device = _joined()
    torch.manual_seed(0)
    reference = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    start = {name: value.clone() for name, value in reference.state_dict().items()}

    def trained(net: torch.nn.Module, parameters: torch.nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(parameters.parameters(), lr=0.1, foreach=True)
        for batch in batches:
            net(batch).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found = [parameter.detach() for parameter in parameters.parameters()]
        return [value.full_tensor().cpu() if hasattr(value, "full_tensor") else value.cpu() for value in found]

    data = [torch.randn(4, 4, generator=torch.Generator().manual_seed(step)) for step in range(4)]
    expected = trained(reference, reference, data)
    shares = [batch[2 * rank : 2 * rank + 2].to(device) for batch in data]
    for kind in ("ddp", "fsdp"):
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        net.load_state_dict(start)
        net.to(device)
        if kind == "ddp":
            found = trained(torch.nn.parallel.DistributedDataParallel(net, device_ids=[rank]), net, shares)
        else:
            for layer in (net[0], net[2]):
                fully_shard(layer)
            fully_shard(net)
            found = trained(net, net, shares)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert sim.races() == []
    _left()
