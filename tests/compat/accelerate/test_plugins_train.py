"""Accelerate's plugins at work: tiny trainings on two ranks end with the weights of a bare loop over whole batches."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset

from engine.interop.accelerate import Accelerator
from engine.interop.accelerate.state import AcceleratorState, GradientState
from engine.interop.accelerate.utils import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    ProfileKwargs,
    broadcast_object_list,
    set_seed,
)

X = torch.randn(
    13, 4, generator=torch.Generator().manual_seed(0)
)  # the last global batch has one sample: a rank has none
EPOCHS = 2
WHOLE = 4
"""Samples of a global batch."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(Block(), Block()), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x))
        return out

    def parallelize(self, mesh: Any) -> dict[str, str]:
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def loss_of(model: Any, x: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))


def bare(window: int = 1, clip: float | None = None) -> list[float]:
    """One process, whole batches; a window of batches is one batch of its size."""
    set_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for _ in range(EPOCHS):
        for start in range(0, len(X), WHOLE * window):
            loss_of(model, X[start : start + WHOLE * window]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return flat(model.state_dict())


def flat(state: dict[str, Tensor]) -> list[float]:
    return [value for tensor in state.values() for value in tensor.flatten().tolist()]


class Script:
    """A training script as Accelerate's documentation has it."""

    def __init__(self, clip: float | None = None, replicas: int = 2, **options: Any) -> None:
        set_seed(3)
        self.clip = clip
        self.accelerator = Accelerator(cpu=True, **options)
        model: Any = Net()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        each = WHOLE if self.accelerator.split_batches else WHOLE // replicas
        loader: Any = DataLoader(TensorDataset(X), batch_size=each)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, loader, schedule
        )

    def epoch(self, loader: Any = None, stop: int | None = None) -> None:
        """A pass over the loader, or over its first ``stop`` batches."""
        accelerator, model = self.accelerator, self.model
        for index, (x,) in enumerate(self.loader if loader is None else loader):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, x))
                if self.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), self.clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if index + 1 == stop:
                return

    def weights(self) -> list[float] | None:
        """The whole model's, on the main process."""
        state = self.accelerator.get_state_dict(self.model)
        return flat(state) if self.accelerator.is_main_process else None


def fsdp(**given: Any) -> dict[str, Any]:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**given)}


def zero(**given: Any) -> dict[str, Any]:
    return {"deepspeed_plugin": DeepSpeedPlugin(**given)}


def mesh(**given: Any) -> dict[str, Any]:
    return {"parallelism_config": ParallelismConfig(**given)}


JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": dict,
    "split batches": lambda: {"dataloader_config": DataLoaderConfiguration(split_batches=True)},
    "fsdp as documented": lambda: fsdp(
        state_dict_config=FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
        limit_all_gathers=True,
    ),
    "fsdp 2": lambda: fsdp(
        fsdp_version=2,
        reshard_after_forward=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    ),
    "gradients sharded": lambda: fsdp(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        cpu_offload=CPUOffload(offload_params=False),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        activation_checkpointing=True,
    ),
    "fsdp offloaded": lambda: fsdp(cpu_offload=True),
    "zero 1": lambda: zero(zero_stage=1),
    "zero 2": lambda: zero(zero_stage=2),
    "zero 3": lambda: zero(zero_stage=3),
    "zero configured": lambda: zero(
        hf_ds_config={
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "train_micro_batch_size_per_gpu": "auto",
        }
    ),
    "replicas": lambda: mesh(dp_replicate_size=2),
    "shards": lambda: {**mesh(dp_shard_size=2), **fsdp(fsdp_version=2)},
    "tensor parallel": lambda: mesh(tp_size=2),
}
KINDS = {"fsdp": "FSDP", "gradi": "FSDP", "zero": "DEEPSPEED", "repli": "FSDP", "shard": "FSDP", "tenso": "FSDP"}
WINDOWS: dict[str, dict[str, Any]] = {"each batch": {}, "windows of two, clipped": {"window": 2, "clip": 0.1}}


CASES = list(itertools.product(JOBS, WINDOWS))
FAST = ("ddp", "fsdp 2")
"""The rest needs a minute."""


def trained(job: str, window: int = 1, clip: float | None = None) -> dict[str, Any]:
    """Both epochs of a job, and what its ranks hold."""
    plugin = GradientAccumulationPlugin(num_steps=window)
    replicas = 1 if job == "tensor parallel" else 2
    script = Script(clip, replicas, gradient_accumulation_plugin=plugin, **JOBS[job]())
    for _ in range(EPOCHS):
        script.epoch()
    held = sum(_local(parameter).numel() for parameter in script.model.parameters())
    return {"weights": script.weights(), "kind": str(script.accelerator.distributed_type), "held": held}


def _local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[no-any-return]


def rank_jobs() -> dict[str, Any]:
    return {f"{job}, {window}": trained(job, **WINDOWS[window]) for job, window in CASES if job in FAST}


def slow_jobs() -> dict[str, Any]:
    slow = [case for case in CASES if case[0] not in FAST and possible(case[0])]
    return {f"{job}, {window}": trained(job, **WINDOWS[window]) for job, window in slow}


def possible(job: str) -> bool:
    return not job.startswith("zero") or importlib.util.find_spec("deepspeed") is not None


def slow_resumed() -> dict[str, Any]:
    """Each job is left in its second epoch, and another script continues it from the checkpoint."""
    folder, found = Path(tempfile.gettempdir()), {}
    for job in filter(possible, ("ddp", "fsdp 2", "zero 3")):
        one = Script(**JOBS[job]())
        path = broadcast_object_list([tempfile.mkdtemp(dir=folder)])[0]
        one.epoch()
        one.epoch(stop=2)
        one.accelerator.save_state(f"{path}/state")
        other = Script(**JOBS[job]())
        other.accelerator.load_state(f"{path}/state")
        other.epoch(other.accelerator.skip_first_batches(other.loader, 2))
        found[job] = {"weights": other.weights(), "rate": other.schedule.get_last_lr()}
        one.accelerator.wait_for_everyone()
        if one.accelerator.is_main_process:
            shutil.rmtree(path)
    return found


def rank_hooks() -> dict[str, Any]:
    """As scripts save their adapters: the hooks save and load the models themselves, the main process writes."""
    script = Script()
    accelerator, path = script.accelerator, broadcast_object_list([tempfile.mkdtemp()])[0]

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            for model in models:
                save_file(accelerator.unwrap_model(model).state_dict(), f"{output_dir}/mine.safetensors")
                weights.pop()

    def load(models: list[Any], input_dir: str) -> None:
        while models:
            accelerator.unwrap_model(models.pop()).load_state_dict(load_file(f"{input_dir}/mine.safetensors"))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    script.epoch()
    accelerator.save_state(f"{path}/state")
    listed = [each.name for each in Path(path).iterdir()]
    with pytest.raises(ValueError, match="missing in the checkpoint"):
        Script().accelerator.load_state(f"{path}/state")  # the model itself is not there, and this script has no hook
    script.epoch()  # goes elsewhere; all of it is taken back
    accelerator.load_state(f"{path}/state")
    script.epoch()
    theirs = accelerator.gather(torch.tensor(flat(accelerator.unwrap_model(script.model).state_dict())).unsqueeze(0))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(path)
    return {"weights": theirs.tolist(), "listed": listed}


def rank_profile() -> dict[str, Any]:
    script = Script()
    accelerator, path = script.accelerator, broadcast_object_list([tempfile.mkdtemp()])[0]
    ready: list[int] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 1, "skip_first": 0},
        on_trace_ready=lambda profiler: ready.append(profiler.step_num),
    )
    with warnings.catch_warnings(), accelerator.profile(handler) as profiler:
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # torch 2.11's, about its default
        for _ in range(4):
            script.epoch(stop=1)
            profiler.step()
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=path)) as profiler:
        script.epoch(stop=1)
    ran = {each.key for each in profiler.key_averages()}
    accelerator.wait_for_everyone()
    names = sorted(each.name for each in Path(path).iterdir())
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(path)
    return {"ready": ready, "names": names, "ran": "aten::addmm" in ran}


def uneven(rules: str, **options: Any) -> list[list[float]]:
    """Three batches over two ranks, plain gradient descent; every rank's weights."""
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    accelerator = Accelerator(cpu=True, rules=rules)
    model: Any = nn.Linear(4, 1)
    model.weight.data.fill_(0.5)
    model.bias.data.zero_()
    loader: Any = DataLoader(TensorDataset(X[:6]), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    with accelerator.join_uneven_inputs([model], **options):
        for (x,) in loader:
            accelerator.backward(loss_of(model, x))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.gather(torch.tensor([flat(accelerator.unwrap_model(model).state_dict())])).tolist()  # type: ignore[no-any-return]


def rank_uneven() -> dict[str, Any]:
    return {"accelerate": uneven("accelerate", even_batches=False), "exact": uneven("exact", even_batches=False)}


@pytest.fixture(scope="module")
def two() -> Any:
    """What the functions with a prefix returned on two ranks."""
    return functools.cache(lambda prefix="rank_": ranks_of_file(__file__, 2, prefix))


@pytest.mark.parametrize(
    ("job", "window"),
    [pytest.param(*case, marks=[] if case[0] in FAST else pytest.mark.slow, id=", ".join(case)) for case in CASES],
)
def test_a_job_equals_a_bare_loop(two: Any, job: str, window: str) -> None:
    if not possible(job):
        pytest.skip("deepspeed is not installed")
    ran = two("rank_" if job in FAST else "slow_")
    main, other = (rank[f"{job}, {window}"] for rank in ran["jobs"])
    torch.testing.assert_close(main["weights"], bare(**WINDOWS[window]), rtol=1e-5, atol=1e-6)
    assert main["kind"] == other["kind"] == KINDS.get(job[:5].strip(), "MULTI_CPU")
    whole = sum(p.numel() for p in Net().parameters())
    if job in ("ddp", "split batches", "replicas", "zero 1", "zero 2", "zero 3"):  # DeepSpeed keeps small parameters
        assert main["held"] == other["held"] == whole
    else:
        assert max(main["held"], other["held"]) < whole


@pytest.mark.slow
@pytest.mark.parametrize("job", ["ddp", "fsdp 2", "zero 3"])
def test_a_job_continues_within_an_epoch(two: Any, job: str) -> None:
    if not possible(job):
        pytest.skip("deepspeed is not installed")
    main, other = (rank[job] for rank in two("slow_")["resumed"])
    torch.testing.assert_close(main["weights"], bare(), rtol=1e-5, atol=1e-6)
    assert main["rate"] == other["rate"] == [0.05 * 0.5**2]  # 8 steps, a third of them to a half


def test_hooks_of_two_ranks(two: Any) -> None:
    for rank in two()["hooks"]:
        assert rank["listed"] == ["state"]
        for weights in rank["weights"]:
            torch.testing.assert_close(weights, bare(), rtol=1e-5, atol=1e-6)


def test_profiles_of_two_ranks(two: Any) -> None:
    for rank in two()["profile"]:
        assert rank == {"ready": [3], "names": ["profile_0.json", "profile_1.json"], "ran": True}


def descended(batches: list[list[Tensor]], shares: list[list[float]]) -> list[float]:
    """Gradient descent by hand: in each step the gradients of its batches, each with its share."""
    model = nn.Linear(4, 1)
    model.weight.data.fill_(0.5)
    model.bias.data.zero_()
    for step, weights in zip(batches, shares, strict=True):
        sum(share * loss_of(model, x) for x, share in zip(step, weights, strict=True)).backward()  # type: ignore[union-attr]
        for p in model.parameters():
            p.data -= 0.1 * p.grad  # type: ignore[operator]
            p.grad = None
    return flat(model.state_dict())


def test_ranks_that_run_out_of_batches(two: Any) -> None:
    # Join divides by all ranks also where one has nothing left; exactly, the rest of the data is the mean over what is there.
    joined = descended([[X[:2], X[2:4]], [X[4:6]]], [[0.5, 0.5], [0.5]])
    exact = descended([[X[:4]], [X[4:6]]], [[1.0], [1.0]])
    for rank in two()["uneven"]:
        torch.testing.assert_close(rank["accelerate"], [joined, joined])
        torch.testing.assert_close(rank["exact"], [exact, exact])
