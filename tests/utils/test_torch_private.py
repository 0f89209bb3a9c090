"""Every private name of torch that the library has, called with the installed torch."""

from __future__ import annotations

import importlib
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import ranks_of, ranks_of_file
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from engine import FSDP, Engine, Loss
from engine.utils import torch_private

CPU = torch.device("cpu")


class Net(nn.Module):
    """Two parts, each a block of FSDP with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def batch(step: int, micro: int) -> Tensor:
    """Four samples: two for each rank."""
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + micro))


def trained(discarded: int, engine: Engine | None) -> list[float]:
    """Three steps of two micro-batches with two optimizers; step ``discarded`` is discarded after its first one. Without an engine: plain PyTorch."""
    model: Any = Net()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.3) for part in (model.body, model.head))
    if engine is None:
        for step in range(3):
            for micro in range(2):
                if step != discarded:
                    (model(batch(step, micro)).square().sum() / 8).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        return [v for p in model.parameters() for v in p.flatten().tolist()]
    plain, (model, first, second) = model, engine.prepare(model, first, second)
    own = slice(2 * engine.process_index, 2 * engine.process_index + 2)
    for step in range(3):
        for micro in range(2):
            with engine.accumulate(model):
                loss = model(batch(step, micro)[own]).square().sum()
                engine.backward(Loss(loss, 2))
                if step == discarded:
                    engine.discard_window()
                    break
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
    return [v for p in plain.parameters() for v in p.full_tensor().flatten().tolist()]  # type: ignore[attr-defined]


def rank_discarded() -> Any:
    """How far two FSDP ranks are from plain PyTorch, whether a window is discarded or not."""
    found = []
    for settings in ({}, {"reduce_each_micro_batch": True}):
        for discarded in (-1, 1):
            engine = Engine(accelerator="cpu", strategy=FSDP(blocks=["Linear"], **settings), accumulate_grad_batches=2)
            both = zip(trained(discarded, engine), trained(discarded, None), strict=True)
            found.append(max(abs(a - b) for a, b in both))
    return found


def rank_sharded() -> Any:
    """Gradients that FSDP has not reduced yet, by parameter, then none."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    found = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        model = Net()
        for part in (model.body, model.head, model):
            fully_shard(part, mp_policy=policy)
        empty = torch_private.unreduced_gradients([model])
        model.set_requires_gradient_sync(False)  # type: ignore[attr-defined]
        for _ in range(2):  # the second one is added to the first
            model(torch.ones(2, 4)).sum().backward()
        gradients = torch_private.unreduced_gradients([model])
        bias = gradients[id(model.head.bias)]
        whole = torch_private.whole_gradients([model])
        torch_private.drop_unreduced_gradients([model])
        found.append(
            [
                len(empty),
                set(gradients) == {id(p) for p in model.parameters()},
                bias.tolist(),
                {id(g) for g in gradients.values()} == {id(g) for g in whole},
                len(torch_private.unreduced_gradients([model])),
            ]
        )
    return found


def rank_replaced() -> Any:
    """A block of two modules, one of whose parameters is replaced after its first forward pass, before a model around it is sharded."""
    from torch.distributed.fsdp import fully_shard

    inner = Net()
    fully_shard([inner.body, inner.head])
    fully_shard(inner)
    inner(torch.ones(2, 4))
    inner.reshard()  # type: ignore[operator]
    inner.head.weight = nn.Parameter(inner.head.weight.detach().clone())
    torch_private.begin_fsdp_again(inner)
    outer = nn.Sequential(inner)
    fully_shard(outer)
    blocks, mesh = torch_private.fsdp_blocks(outer), torch_private.fsdp_mesh([inner.body])
    known = any(p is inner.head.weight for p in blocks[0].parameters)
    outer(torch.ones(2, 4)).sum().backward()
    assert mesh is not None
    modules = [inner.get_submodule(name) for name in ("", "body", "head")]
    return [
        len(blocks),
        mesh.size(),
        torch_private.fsdp_modules(outer) == [outer, *modules],
        known,
        inner.head.weight.grad is not None,
    ]


def rank_groups() -> Any:
    rank = dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    own = dist.new_group([1])
    before = torch_private.collectives_started(world)
    dist.all_reduce(torch.ones(1))
    torch_private.set_timeout(world, timedelta(seconds=77))
    inside = torch_private.member(own)
    return {
        "listed": world in torch_private.process_groups(),
        "started": torch_private.collectives_started(world) - before,
        "timeout": world._get_backend(CPU).options._timeout.total_seconds(),  # type: ignore[attr-defined]
        "member": (inside is own) if rank else (inside is None and own is dist.GroupMember.NON_GROUP_MEMBER),
        "splits": torch_private.can_split(world, CPU),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return ranks_of_file(__file__, 2)


def test_sharded_parameters_are_found_again(found: Any) -> None:
    assert found["replaced"] == [[1, 2, True, True, True]] * 2


def test_windows_are_discarded_under_fsdp_with_several_optimizers(found: Any) -> None:
    for distances in found["discarded"]:
        assert max(distances) < 1e-6


def test_gradients_that_are_not_reduced_yet(found: Any) -> None:
    # Two samples, two passes: a bias has the gradient 2 of each.
    assert found["sharded"] == [[[0, True, [4.0], True, 0]] * 2] * 2


def test_process_groups(found: Any) -> None:
    splits = found["groups"][0].pop("splits"), found["groups"][1].pop("splits")
    assert splits[0] is splits[1]
    assert found["groups"] == [{"listed": True, "started": 1, "timeout": 77.0, "member": True}] * 2


def test_nothing_is_recorded_without_nccl() -> None:
    record = torch_private.nccl_record()
    assert record is None or b"version" in (record if isinstance(record, bytes) else record.encode())


def test_placements() -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = [Shard(0), Replicate(), _StridedShard(0, split_factor=2)]
    assert [torch_private.is_strided_shard(placement) for placement in strided] == [False, False, True]


def test_optimizers() -> None:
    weight = nn.Parameter(torch.ones(2))
    fused, plain = torch.optim.SGD([weight], lr=0.1, fused=True), torch.optim.SGD([weight], lr=0.1)
    assert torch_private.takes_amp_scaling(fused)
    assert not torch_private.takes_amp_scaling(plain)
    torch_private.forget_amp_scaling(fused)
    torch_private.forget_amp_scaling(plain)
    assert not torch_private.takes_amp_scaling(fused)


def test_scaled_gradients() -> None:
    gradient, flag, scale, tracker = torch.tensor([8.0, 4.0]), torch.zeros(1), torch.full((1,), 8.0), torch.zeros(1)
    torch_private.unscale([gradient], flag, torch.tensor(0.5))
    assert (gradient.tolist(), flag.item()) == ([4.0, 2.0], 0.0)
    torch_private.unscale([torch.tensor([torch.inf])], flag, torch.tensor(0.5))
    torch_private.update_scale(scale, tracker.int(), flag, 2.0, 0.5, 2000)
    assert (flag.item(), scale.item()) == (1.0, 4.0)


def test_fp8_products() -> None:
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about the flag
        with torch.backends.mkldnn.flags(enabled=False):  # torch's own kernel: on some processors oneDNN's needs AMX
            assert (torch_private.fp8_product(ones, ones.t(), torch.ones(())) == 16).all()


def test_forks() -> None:
    class Added:
        """A device without the name."""

    assert torch_private.is_after_fork(Added) is False
    assert torch_private.is_after_fork(torch.cuda) is False


def test_modes_see_operations() -> None:
    class Names(torch_private.DispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            leaves, _ = torch_private.flatten(args)
            names.append((function._schema.name, [torch_private.is_wrapper(leaf) for leaf in leaves]))
            return torch_private.map_only(Tensor, torch_private.negative_view, function(*args, **(kwargs or {})))

    names: list[Any] = []
    tensor = torch.ones(2)
    assert torch_private.dispatch_modes() == []
    with Names() as mode:
        assert torch_private.dispatch_modes() == [mode]
        negative = tensor + 1
        assert not torch_private.is_simulated()
    assert negative.tolist() == [-2, -2]
    assert names[0] == ("aten::add", [False, False])
    with torch_private.fake_mode():
        assert torch_private.is_simulated()
    assert torch_private.conjugate_view(torch.tensor([1j])).tolist() == [-1j]
    assert torch_private.TensorBase.is_meta.__get__(tensor) is False


def test_modes() -> None:
    with torch_private.fake_mode() as mode:
        assert torch.ones(2).device == CPU
        with torch_private.without_modes():
            assert torch.ones(2).tolist() == [1.0, 1.0]
    assert type(mode).__name__ == "FakeTensorMode"
    assert not torch_private.is_in_flight(torch.ones(2))


def test_what_is_compiled_leaves_a_function_out() -> None:
    @torch_private.without_dynamo
    def left_out(x: Tensor) -> Tensor:
        return x + len(str(x.item()))  # has no graph

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.compile(lambda x: left_out(x) * 2, backend="eager")(torch.ones(())) == 8.0


def test_hooks_around_calls_of_a_module() -> None:
    """Of a plain one and of a compiled one, also where it fails; both are as before once they are removed."""
    for compiled in (False, True):
        module, events = nn.Linear(2, 2), []
        if compiled:
            module.compile(backend="eager")
        handles = torch_private.around_calls(
            module, lambda *_, events=events: events.append("before"), lambda *_, events=events: events.append("after")
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module(torch.ones(1, 2))
            with pytest.raises((RuntimeError, TypeError)):
                module(torch.ones(1, 3))
            assert events == ["before", "after"] * 2
            for handle in handles:
                handle.remove()
            module(torch.ones(1, 2))
        assert len(events) == 4
        assert (module._compiled_call_impl is not None) == compiled


def test_batch_norm() -> None:
    assert all(issubclass(kind, torch_private.BatchNorm) for kind in (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm))


def test_passes_over_lists() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([2.0])]
    torch_private.multiply(tensors, 2.0)
    torch_private.multiply(tensors, torch.tensor(0.5))
    assert [t.tolist() for t in tensors] == [[3.0, 4.0], [2.0]]
    assert [norm.item() for norm in torch_private.norms(tensors)] == [5.0, 2.0]


def test_fsdp_finds_the_tensors_in_a_loss() -> None:
    loss = Loss(torch.ones(()), torch.ones(()))
    assert torch.utils._pytree.tree_leaves({"loss": loss}) == [loss.sum, loss.count]


def rank_wrapped() -> list[Any]:
    """What a wrapper says before and after backward passes: of a static graph, and one that leaves a parameter out."""
    static = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), static_graph=True)
    before = torch_private.static_graph_is_known(static)
    static(torch.ones(1, 1)).backward()
    partly = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    torch_private.check_reduced(partly)
    partly(torch.ones(1, 1))
    next(partly.module[1].parameters()).sum().backward()
    with pytest.raises(RuntimeError, match=r"did not receive grad for rank \d: 0 1 3"):
        torch_private.check_reduced(partly)
    return [before, torch_private.static_graph_is_known(static)]


def test_wrappers_know_their_graph_and_what_is_not_reduced(found: Any) -> None:
    assert found["wrapped"] == [[False, True]] * 2


def test_a_torch_without_a_name_is_one_error() -> None:
    [error] = ranks_of(without_a_name, 1)
    assert error == (
        f"engine needs parts of torch that torch {torch.__version__} does not have (module 'torch' has no attribute '_foreach_norm'): "
        "use torch 2.11 to 2.15"
    )


def without_a_name() -> str:
    del torch._foreach_norm  # type: ignore[attr-defined]
    with pytest.raises(ImportError) as error:
        importlib.reload(torch_private)
    return str(error.value)
