"""What the simulated accelerator itself must find, count and leave alone. Each function is played in a process of its own."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import simulated as sim
import torch
from torch import nn

NUMBERS = torch.arange(8.0)


def _reported(found: list[str], *words: str) -> None:
    """Something is reported, and each of these words stands in it."""
    assert found
    assert all(word in " ".join(found) for word in words), found


@contextmanager
def _error(text: str, kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """The block ends with this error."""
    try:
        yield
    except kind as error:
        if text not in str(error):
            raise
    else:
        raise AssertionError(f"no error: {text}")


def _names() -> list[str]:
    found = [wait.name for wait in sim.waits()]
    sim.clear()
    return found


def a_planted_race_is_found() -> None:
    side, numbers = torch.Stream("sim"), torch.ones(8, device="sim")
    with side:
        doubled = numbers * 2
    _reported(sim.races(), "read after write", "aten::mul on stream 1", "aten::fill_ on stream 0")
    sim.clear()
    numbers.add_(1)
    _reported(sim.races(), "write after read", "aten::add on stream 0", "aten::mul on stream 1")
    sim.clear()
    doubled.zero_()
    _reported(sim.races(), "write after write", "aten::zero_ on stream 0")


def ordered_streams_are_no_race() -> None:
    side, numbers = torch.Stream("sim"), NUMBERS.to("sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        doubled = numbers * 2
        event = side.record_event()
    torch.accelerator.current_stream().wait_event(event)
    assert (doubled + numbers).tolist() == (NUMBERS * 3).tolist()
    numbers.add_(1)
    assert sim.races() == []


def an_event_orders_only_what_came_before_it() -> None:
    side = torch.Stream("sim")
    with side:
        first = torch.ones(8, device="sim")
        event = side.record_event()
        second = torch.ones(8, device="sim")
    torch.accelerator.current_stream().wait_event(event)
    first.add_(1)
    assert sim.races() == []
    second.add_(1)
    _reported(sim.races(), "aten::add", "aten::fill_")


def two_streams_may_use_two_parts_of_one_tensor() -> None:
    side, numbers = torch.Stream("sim"), torch.zeros(8, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        numbers[:4].add_(1)
    numbers[4:].add_(1)
    assert sim.races() == []
    numbers[3:5].add_(1)
    _reported(sim.races(), "aten::add")


def a_thread_that_waits_orders_nothing_for_another() -> None:
    side = torch.Stream("sim")
    with side:
        numbers = torch.ones(8, device="sim")
    waiting = threading.Thread(target=side.synchronize)
    waiting.start()
    waiting.join()
    numbers.add_(1)
    _reported(sim.races(), "aten::add")
    assert [wait.in_training for wait in sim.waits()] == [False]
    sim.clear()
    side.synchronize()
    numbers.add_(1)
    assert sim.races() == []


def memory_that_another_stream_still_uses_is_not_reused_unseen() -> None:
    side = torch.Stream("sim")

    def leave_to_side() -> torch.Tensor:
        numbers = torch.ones(8, device="sim")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            return numbers * 2

    kept = leave_to_side()
    reused = torch.zeros(8, device="sim")
    _reported(sim.races(), "write after read", "aten::zero", "aten::mul on stream 1")
    assert reused.data_ptr() != kept.data_ptr()


def record_stream_keeps_memory_until_the_other_stream_is_done() -> None:
    side, numbers = torch.Stream("sim"), torch.ones(8, device="sim")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        doubled = numbers * 2
    numbers.record_stream(side)
    where = numbers.data_ptr()
    del numbers
    reused = torch.zeros(8, device="sim")
    assert reused.data_ptr() == where
    assert sim.races() == []
    side.synchronize()
    assert doubled.tolist() == [2.0] * 8


def planted_waits_are_found() -> None:
    numbers = NUMBERS.to("sim")
    pinned = torch.empty(8, pin_memory=True)
    assert _names() == ["copy H2D"]
    NUMBERS.to("sim", non_blocking=True)  # staged
    pinned.to("sim", non_blocking=True)
    pinned.copy_(numbers, non_blocking=True)
    torch.full((3,), 1.0, device="sim")
    nn.functional.one_hot(torch.zeros(2, dtype=torch.long, device="sim"), 3)
    assert _names() == []
    numbers.sum().item()
    assert _names() == ["item"]
    torch.empty(8).copy_(numbers, non_blocking=True)  # into pageable memory
    assert _names() == ["copy D2H"]
    if numbers[0] > 1:
        raise AssertionError
    assert _names() == ["item"]
    torch.nonzero(numbers)
    numbers[numbers > 3]
    torch.equal(numbers, numbers)
    assert _names() == ["aten::nonzero", "aten::nonzero", "aten::equal"]
    numbers[torch.tensor([1, 2], device="sim").detach()]
    assert _names() == ["copy H2D"]  # of the list
    numbers[numbers > 3] = 1.0
    assert _names() == []
    torch.accelerator.synchronize()
    torch.accelerator.current_stream().synchronize()
    event = torch.Event("sim")
    event.record()
    assert event.query()
    assert _names() == ["device.synchronize", "stream.synchronize"]
    event.synchronize()
    (wait,) = sim.waits()
    assert wait.name == "event.synchronize"
    assert wait.in_training
    assert "planted_waits_are_found" in wait.stack[0]


def a_wait_in_backward_is_the_trainings() -> None:
    numbers = torch.ones(4, device="sim", requires_grad=True)
    numbers.register_hook(lambda gradient: print(gradient.sum().item()))
    (numbers * 2).sum().backward()
    assert [wait.name for wait in sim.waits() if wait.in_training] == ["item"]


def a_planted_device_mix_is_an_error() -> None:
    first, second = (torch.ones(3, device=f"sim:{index}") for index in (0, 1))
    for other in (second, torch.ones(3)):
        with _error(f"at least two devices, sim:0 and {other.device}"):
            first + other
    assert (first + torch.tensor(1.0)).tolist() == [2.0] * 3  # a number is not a CPU tensor
    assert first.to("sim:1").add(second).tolist() == [2.0] * 3
    assert sim.races() == []


def two_devices_have_memory_and_streams_of_their_own() -> None:
    with torch.sim.device(1):
        assert torch.accelerator.current_device_index() == 1
        numbers = torch.ones(1024, device="sim")
    assert numbers.device == torch.device("sim", 1)
    assert torch.accelerator.current_device_index() == 0
    assert (torch.sim.memory_allocated(0), torch.sim.memory_allocated(1)) == (0, 4096)
    assert torch.accelerator.current_stream(0) != torch.accelerator.current_stream(1)
    assert torch.get_device_module("sim").device_count() == torch.accelerator.device_count() == 2
    with _error("there are 2 simulated devices"):
        torch.accelerator.set_device_index(2)


def a_copy_to_pinned_memory_arrives_when_the_host_knows() -> None:
    numbers, pinned = NUMBERS.to("sim"), torch.zeros(8, pin_memory=True)
    assert pinned.is_pinned()
    assert not NUMBERS.is_pinned()
    pinned.copy_(numbers, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    numbers.zero_()
    assert not (pinned == NUMBERS).any()  # too early
    event.synchronize()
    assert torch.equal(pinned, NUMBERS)
    pinned.copy_(numbers, non_blocking=True)
    assert torch.equal(pinned.to("sim", non_blocking=True), numbers)  # in the stream's order it is there
    assert sim.races() == []


def pinned_memory_that_changes_during_its_copy_is_found() -> None:
    pinned = NUMBERS.pin_memory()
    pinned.to("sim", non_blocking=True)
    torch.accelerator.synchronize()
    pinned.zero_()  # late enough
    torch.accelerator.synchronize()
    assert sim.races() == []
    pinned.to("sim", non_blocking=True)
    pinned.add_(1)
    torch.accelerator.synchronize()
    _reported(sim.races(), "the host has changed pinned memory")


def _out_and_back(*waits: str) -> list[str]:
    """The races of a copy to pinned memory on one stream, one back on another, and one to the same memory on the first, with these waits."""
    sim.clear()
    out, back, pinned = torch.Stream("sim"), torch.Stream("sim"), torch.zeros(8, pin_memory=True)
    main, numbers = torch.accelerator.current_stream(), NUMBERS.to("sim")
    for stream in (out, back):
        stream.wait_stream(main)
    with out:
        pinned.copy_(numbers, non_blocking=True)
    if "for the copy out" in waits:
        back.wait_stream(out)
    with back:
        restored = torch.empty(8, device="sim")
        restored.copy_(pinned, non_blocking=True)
    if "for the copy back" in waits:
        out.wait_stream(back)
    with out:
        pinned.copy_(numbers, non_blocking=True)
    main.wait_stream(back)
    if "for the copy out" in waits:
        assert restored.tolist() == NUMBERS.tolist()
    torch.accelerator.synchronize()
    return sim.races()


def copies_through_pinned_memory_without_an_order_are_found() -> None:
    assert _out_and_back("for the copy out", "for the copy back") == []
    races = _out_and_back("for the copy back")
    _reported(races[:1], "read after write: copy H2D", "is not ordered after copy D2H", "of pinned memory")
    races = _out_and_back("for the copy out")
    _reported(races[:1], "write after read: copy D2H", "is not ordered after copy H2D", "of pinned memory")
    out, pinned = torch.Stream("sim"), torch.zeros(8, pin_memory=True)
    numbers = NUMBERS.to("sim")
    out.wait_stream(torch.accelerator.current_stream())
    sim.clear()
    with out:
        pinned[:4].copy_(numbers[:4], non_blocking=True)
    pinned[4:].copy_(numbers[4:], non_blocking=True)  # other bytes of the same memory
    assert sim.races() == []
    pinned[3:5].copy_(numbers[3:5], non_blocking=True)
    _reported(sim.races(), "write after write: copy D2H on stream 0")


def a_host_that_waits_orders_copies_through_pinned_memory() -> None:
    out, back, pinned = torch.Stream("sim"), torch.Stream("sim"), torch.zeros(8, pin_memory=True)
    numbers = NUMBERS.to("sim")
    out.wait_stream(torch.accelerator.current_stream())
    with out:
        pinned.copy_(numbers, non_blocking=True)
    out.synchronize()
    with back:
        restored = pinned.to("sim", non_blocking=True)
    back.synchronize()
    assert restored.tolist() == NUMBERS.tolist()
    assert sim.races() == []


def bytes_are_counted() -> None:
    memory = torch.accelerator
    assert memory.memory_allocated() == 0
    numbers = torch.empty(1000, device="sim")  # 4000 bytes in blocks of 512
    assert memory.memory_allocated() == memory.max_memory_allocated() == torch.sim.memory_allocated() == 4096
    other = torch.empty(1, device="sim")
    del numbers
    assert (memory.memory_allocated(), memory.max_memory_allocated(), memory.memory_reserved()) == (512, 4608, 4608)
    torch.sim.reset_peak_memory_stats()
    assert memory.max_memory_allocated() == 512
    for _ in range(10):
        numbers = torch.empty(1000, device="sim")
    assert (memory.memory_reserved(), memory.max_memory_reserved()) == (
        8704,
        8704,
    )  # a new one beside the old one, once
    del numbers
    torch.sim.empty_cache()
    assert memory.memory_reserved() == other.untyped_storage().nbytes() + 508
    assert torch.sim.memory_stats()["allocated_bytes.all.current"] == 512
    free, total = torch.sim.mem_get_info()
    assert total - free == 512
    before = sim.pinned_bytes()
    pinned = torch.empty(1000, pin_memory=True)
    assert sim.pinned_bytes() - before == 4096  # a power of two
    del pinned
    assert sim.pinned_bytes() == before


def a_full_device_is_out_of_memory() -> None:
    sim.set_capacity(0, 1 << 20)
    with _error("sim out of memory", torch.OutOfMemoryError):
        torch.empty(1 << 20, device="sim")
    assert torch.empty(1 << 10, device="sim").numel() == 1 << 10


def streams_come_round() -> None:
    numbers = [torch.Stream("sim").stream_id for _ in range(65)]
    assert numbers[:32] == numbers[32:64] == list(range(1, 33))
    assert numbers[64] == 1
    assert torch.Stream("sim", priority=-1).stream_id == 33  # a pool of their own, as on CUDA
    assert torch.Stream("sim:1").stream_id == 1
    assert torch.sim.default_stream() == torch.accelerator.current_stream()


def parameters_stay_themselves() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    layer(torch.ones(1, 2)).sum().backward()
    layer.to("sim")
    assert layer.weight is weight
    assert weight.device.type == weight.grad.device.type == "sim"
    layer.half().cpu()
    assert layer.weight is weight
    assert weight.dtype == torch.float16


def each_device_has_a_generator() -> None:
    torch.manual_seed(1)
    expected, after = torch.rand(4), torch.get_rng_state()
    first = torch.rand(4, device="sim:0")
    assert torch.equal(first.cpu(), expected)
    assert torch.equal(torch.get_rng_state(), after)  # the CPU's has not moved
    assert torch.equal(torch.rand(4, device="sim:1").cpu(), expected)  # nor the other device's
    state = torch.sim.get_rng_state()
    dropped = nn.functional.dropout(torch.ones(100, device="sim"))  # a kernel that takes no generator
    assert torch.equal(torch.get_rng_state(), after)
    torch.sim.set_rng_state(state)
    assert torch.equal(nn.functional.dropout(torch.ones(100, device="sim")), dropped)
    own = torch.Generator("sim").manual_seed(1)
    assert torch.equal(torch.rand(4, device="sim", generator=own).cpu(), expected)
    with _error("Expected a 'sim:1' generator, but found 'sim:0'"):
        torch.rand(4, device="sim:1", generator=own)


def autocast_computes_in_low_precision() -> None:
    layer = nn.Linear(4, 4, device="sim")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("sim", dtype):
            result = layer(torch.ones(2, 4, device="sim"))
            assert result.dtype == dtype
            assert torch.relu(result).dtype == dtype
            assert nn.functional.mse_loss(result, result).dtype == torch.float32
    assert torch.sim.is_bf16_supported()


def optimizers_give_the_cpus_numbers() -> None:
    def trained(device: str, kind: type[torch.optim.Optimizer], **how: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        data, optimizer = torch.randn(5, 16, 4), kind(net.parameters(), lr=0.1, **how)
        for batch in data:
            net(batch.to(device)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in net.parameters()]

    for kind in (torch.optim.SGD, torch.optim.AdamW):
        for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            pairs = zip(trained("cpu", kind, **how), trained("sim", kind, **how), strict=True)
            assert all(torch.equal(ours, theirs) for ours, theirs in pairs), (kind, how)
    assert sim.races() == []


def kernels_with_out_and_views_reach_the_devices_memory() -> None:
    out = torch.empty(0, device="sim")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.add(NUMBERS.to("sim"), 1, out=out)
    assert out.tolist() == (NUMBERS + 1).tolist()
    square = NUMBERS.to("sim").view(2, 4)
    square.t()[0].zero_()
    square.unfold(1, 2, 2)[0, 0].add_(5)
    assert square.tolist() == [[5.0, 6.0, 2.0, 3.0], [0.0, 5.0, 6.0, 7.0]]
    storage = square.untyped_storage()
    storage.resize_(0)
    storage.resize_(64)
    square.fill_(3)
    assert square.sum().item() == 24.0
