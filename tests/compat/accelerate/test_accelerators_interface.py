"""Arguments, attributes and trackers of an ``Accelerator``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import accelerate as theirs
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from engine.compat.accelerate import arguments as translation
from engine.interop import accelerate
from engine.interop.accelerate import Accelerator, AcceleratorState, PartialState, tracking
from engine.interop.accelerate import utils as u
from engine.interop.accelerate.tracking import GeneralTracker


def settings(
    monkeypatch: pytest.MonkeyPatch | None = None, env: dict[str, str] | None = None, **given: Any
) -> dict[str, Any]:
    """The engine's arguments for these of Accelerate's."""
    names = Accelerator(cpu=True)._arguments
    for name, value in (env or {}).items():
        assert monkeypatch is not None
        monkeypatch.setenv(name, value)
    return translation.engine_settings({**names, **given}, None)[0]


def test_plugins_become_strategies() -> None:
    fsdp = u.FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=False, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )  # fmt: skip
    assert settings(fsdp_plugin=fsdp)["strategy"] == {
        "name": "fsdp",
        "reshard_after_forward": False,
        "blocks": ["Block"],
    }
    zero = u.DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu", gradient_accumulation_steps=4)
    found = settings(deepspeed_plugin=zero)
    assert found["strategy"] == {"name": "deepspeed", "stage": 3, "offload_optimizer": "cpu"}
    assert found["accumulate_grad_batches"] == 4
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    assert settings(deepspeed_plugin=u.DeepSpeedPlugin(hf_ds_config=config))["strategy"] == {
        "name": "deepspeed",
        "config": config,
    }
    mesh = settings(parallelism_config=u.ParallelismConfig(tp_size=2, dp_shard_size=4))
    assert mesh["strategy"] == {"name": "mesh", "tp": 2, "dp_replicate": 1, "dp_shard": 4}
    compiled = settings(dynamo_plugin=u.TorchDynamoPlugin(backend="inductor", fullgraph=True))
    assert compiled["compile"] == {"backend": "inductor", "dynamic": False, "fullgraph": True}
    ddp = u.DistributedDataParallelKwargs(
        comm_hook=u.DDPCommunicationHookType.POWER_SGD, comm_state_option={"matrix_approximation_rank": 2}
    )
    assert ddp.to_strategy() == {"name": "ddp", "comm_hook": "powersgd", "powersgd_rank": 2}


def test_variables_of_its_launcher_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    more = {
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3",
    }
    found = settings(monkeypatch, env | more)
    assert found["strategy"] == {
        "name": "fsdp",
        "reshard_after_forward": True,
        "cpu_offload": True,
        "blocks": ["Block"],
    }
    assert (found["precision"], found["accumulate_grad_batches"]) == ("bf16-mixed", 3)


def test_plugins_without_values_have_those_of_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without, a script that gives ``ParallelismConfig()`` to be configured by its launcher trains another strategy."""
    env = {
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
        "ACCELERATE_DYNAMO_BACKEND": "eager",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True",
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for ours, expected in (
        (u.ParallelismConfig(), theirs.ParallelismConfig()),
        (u.ParallelismConfig(tp_size=1), theirs.ParallelismConfig(tp_size=1)),
    ):
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            assert getattr(ours, name) == getattr(expected, name)
    assert u.TorchDynamoPlugin().to_kwargs() == {"backend": "eager", "fullgraph": "True"}
    mesh = settings(monkeypatch, {}, parallelism_config=u.ParallelismConfig(), dynamo_plugin=u.TorchDynamoPlugin())
    assert mesh["strategy"] == {"name": "mesh", "tp": 2, "dp_replicate": 1, "dp_shard": 4}
    compiled = {"backend": "eager", "dynamic": False}
    whole = {**compiled, "fullgraph": True}
    assert mesh["compile"] == settings()["compile"] == whole
    assert settings(dynamo_plugin=u.TorchDynamoPlugin(fullgraph=False))["compile"] == compiled
    assert settings(dynamo_backend="aot_eager")["compile"] == {**whole, "backend": "aot_eager"}
    with pytest.raises(ValueError, match="tp_size must be at least 1, but got 0"):
        u.ParallelismConfig(tp_size=0)


def test_the_variable_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState._reset_state()
    for name in ("cuda:3", "xpu", "cpu:64"):
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", name)
        with pytest.raises(ValueError, match=f"ACCELERATE_TORCH_DEVICE={name}"):
            PartialState(cpu=True)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert PartialState().device.type == "cpu"


def test_where_a_window_ends_cannot_be_set() -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(AttributeError, match=r"accumulate\(model\) decides"):
        accelerator.sync_gradients = False
    assert accelerator.sync_gradients is True


def test_helpers_for_trees_and_variables() -> None:
    tree = [1, "a", {"x": torch.ones(2, dtype=torch.bfloat16)}]
    assert (u.find_device(tree), u.find_device([1, "a"])) == (torch.device("cpu"), None)
    assert u.listify(tree) == theirs.utils.operations.listify(tree) == [1, "a", {"x": [1.0, 1.0]}]
    assert u.operations.convert_outputs_to_fp32(lambda: tree)()[2]["x"].dtype == torch.float32
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.warns(u.operations.CannotPadNestedTensorWarning, match="nested"):
        assert u.pad_across_processes(nested) is nested
    with pytest.warns(UserWarning, match="B=< is left out"):
        assert u.convert_dict_to_env_variables({"A": "1", "B": "<"}) == ["A=1\n"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fsdp_plugin": u.FullyShardedDataParallelPlugin(param_init_fn=print)}, "fsdp_param_init_fn"),
        ({"deepspeed_plugin": u.DeepSpeedPlugin(gradient_clipping=1.0)}, "clip_grad_norm_"),
        (
            {"fsdp_plugin": u.FullyShardedDataParallelPlugin(), "deepspeed_plugin": u.DeepSpeedPlugin()},
            "give one of them",
        ),
        ({"torch_tp_plugin": u.TorchTensorParallelPlugin(tp_size=2)}, r"ParallelismConfig\(tp_size=2\)"),
        ({"mixed_precision": "fp32"}, "possible: no, fp16, bf16, fp8"),
        ({"kwargs_handlers": [object()]}, "object is given twice, or has no counterpart"),
        (
            {"kwargs_handlers": [u.DistributedDataParallelKwargs(comm_hook="BATCHED_POWER_SGD")]},
            "comm_hook=BATCHED_POWER_SGD",
        ),
        ({"kwargs_handlers": [u.InitProcessGroupKwargs(init_method="file:///x")]}, "init_method"),
        ({"log_with": "comet_ml"}, "log_with='comet_ml' has no counterpart"),
        (
            {"gradient_accumulation_plugin": u.GradientAccumulationPlugin(sync_with_dataloader=False)},
            "rules='accelerate'",
        ),
    ],
)
def test_what_has_no_counterpart_is_an_error(given: dict[str, Any], said: str) -> None:
    PartialState._reset_state()
    with pytest.raises(ValueError, match=said):
        Accelerator(cpu=True, **given)


def test_attributes() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2, split_batches=True)
    state = AcceleratorState()
    assert (state.mixed_precision, accelerator.mixed_precision, str(accelerator.distributed_type)) == (
        "bf16",
        "bf16",
        "NO",
    )
    assert (state.num_processes, state.device, state.is_main_process) == (1, torch.device("cpu"), True)
    assert accelerator.split_batches
    assert not accelerator.use_distributed
    accelerator.gradient_accumulation_steps = 4
    assert accelerator.accumulate_grad_batches == accelerator.gradient_state.num_steps == 4
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.mixed_precision == "bf16"
    assert again.gradient_state.num_steps == 2  # as it was made
    with pytest.raises(ValueError, match="rules='fast' is unknown"):
        Accelerator(cpu=True, rules="fast")


@pytest.mark.parametrize("rules", ["exact", "accelerate"])
def test_prepared_objects_are_those_of_the_accelerator(rules: Any) -> None:
    accelerator, model = Accelerator(cpu=True, rules=rules), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    prepared = accelerator.prepare(model, optimizer, scheduler, torch.utils.data.DataLoader([1, 2]), [3])
    lists = (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
    for item, items in zip(prepared, lists, strict=False):
        assert len(items) == 1
        assert items[0] is item is accelerator.prepare(item)
        assert item._is_accelerate_prepared
    accelerator.free_memory()
    assert not accelerator._models
    assert not accelerator._optimizers
    assert not accelerator._dataloaders


@pytest.mark.parametrize("rules", ["exact", "accelerate"])
def test_scripts_that_accumulate_without_the_block(rules: Any) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, rules=rules)
    model: Any = torch.nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(model)
    for value in (2.0, 4.0):
        accelerator.backward(model(torch.full((3, 1), value)).mean())
    assert model.weight.grad.item() == (2.0 + 4.0) / 2  # Accelerate's backward divides


def test_scaler_settings() -> None:
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", kwargs_handlers=[u.GradScalerKwargs(init_scale=8.0, growth_interval=3)]
    )
    assert (accelerator.scaler.get_scale(), accelerator.scaler.get_growth_interval()) == (8.0, 3)


class Notes(GeneralTracker):
    name, requires_logging_directory, tracker = "notes", False, "raw"

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.told.append((values, step, kwargs))

    def finish(self) -> None:
        self.told.append("end")


def test_trackers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    notes = Notes()
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", notes], project_dir=str(tmp_path))
    accelerator.init_trackers("mine", {"lr": 0.1})
    for step in range(1, 4):
        accelerator.log(
            {"loss": torch.tensor(1.0 / step), "note": "text"}, step=step, log_kwargs={"notes": {"tag": step}}
        )
    accelerator.end_training()
    assert notes.told[0] == {"lr": 0.1}
    assert notes.told[-1] == "end"
    assert notes.told[1][1:] == (1, {"tag": 1})
    assert accelerator.get_tracker("notes", unwrap=True) == "raw"
    (folder,) = {path.parent for path in (tmp_path / "mine").rglob("events.out.*")}
    events = EventAccumulator(str(folder)).Reload()
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5), (3, 0.3333)]
    with pytest.raises(ValueError, match="'wandb' is not a tracker"):
        accelerator.get_tracker("wandb")


def test_trackers_of_accelerates_classes(tmp_path: Path) -> None:
    tracker = tracking.TensorBoardTracker("mine", tmp_path / "own")
    accelerator = Accelerator(cpu=True, log_with=[tracker, "tensorboard"], project_dir=tmp_path)
    accelerator.init_trackers("project", {"lr": 0.5, "name": "x"})
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    for folder in (tmp_path / "own" / "mine", tmp_path / "project"):
        [file] = [path for path in folder.iterdir() if path.is_file()]
        assert [event.value for event in EventAccumulator(str(file)).Reload().Scalars("loss")] == [1.0]
        [settings] = folder.glob("*/hparams.yml")
        assert yaml.safe_load(settings.read_text()) == {"lr": 0.5, "name": "x"}
    alone = tracking.TensorBoardTracker("alone", tmp_path)
    alone.start()
    alone.store_init_configuration({"lr": 1.0})
    alone.log({"loss": 2.0}, step=3)
    alone.finish()
    [file] = [path for path in (tmp_path / "alone").iterdir() if path.is_file()]
    assert [(event.step, event.value) for event in EventAccumulator(str(file)).Reload().Scalars("loss")] == [(3, 2.0)]
    with pytest.raises(ValueError, match="needs a folder: give Accelerator"):
        Accelerator(cpu=True, log_with="tensorboard").init_trackers("x")
    with pytest.raises(
        NotImplementedError, match="SwanLabTracker has no counterpart: give log_with the tracker's name"
    ):
        tracking.SwanLabTracker("x")
    for name, kind in tracking.LOGGER_TYPE_TO_CLASS.items():
        assert kind.name == name
        assert kind.requires_logging_directory == (name == "tensorboard")


def test_a_registered_tracker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", dict(tracking.LOGGER_TYPE_TO_CLASS))

    class Mine(Notes):
        name = "mine"

        def __init__(self, run_name: str, more: int = 0) -> None:
            super().__init__()
            self.run_name, self.more = run_name, more

    tracking.register_tracker_class(Mine)
    with pytest.warns(UserWarning, match="the tracker 'mine' is replaced by Mine"):
        tracking.register_tracker_class(Mine)
    with pytest.raises(TypeError, match="takes a subclass of GeneralTracker"):
        tracking.register_tracker_class(int)
    accelerator = Accelerator(cpu=True, log_with="mine")
    accelerator.init_trackers("project", {"lr": 1}, init_kwargs={"mine": {"more": 3}})
    tracker = accelerator.get_tracker("mine")
    assert (tracker.run_name, tracker.more, tracker.told) == ("project", 3, [{"lr": 1}])


def test_loaders_that_skip() -> None:
    data = torch.utils.data.BatchSampler(range(7), 2, drop_last=False)
    skipping = accelerate.data_loader.SkipBatchSampler(data, 2)
    assert ([*skipping], len(skipping), skipping.total_length) == ([[4, 5], [6]], 2, 4)
    loader = accelerate.data_loader.SkipDataLoader(range(7), skip_batches=1, batch_size=3)
    assert ([batch.tolist() for batch in loader], len(loader)) == ([[3, 4, 5], [6]], 2)


def test_the_dimensions_of_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    for given in ({}, {"tp_size": 2}, {"dp_replicate_size": 2, "cp_size": 4}, {"dp_shard_size": 4, "sp_size": 2}):
        ours, expected = u.ParallelismConfig(**given), theirs.ParallelismConfig(**given)
        for name in (
            *(
                "total_size",
                "data_parallel_size",
                "non_data_parallel_size",
                "dp_dim_names",
                "dp_shard_cp_dim_names",
                "dp_cp_dim_names",
            ),
            *("tp_enabled", "cp_enabled", "sp_enabled", "dp_shard_enabled", "dp_replicate_enabled"),
        ):
            assert getattr(ours, name) == getattr(expected, name), name
        assert {*ours.active_mesh_dims} == {*expected.active_mesh_dims}
        assert ours._get_mesh() == expected._get_mesh()
    monkeypatch.delenv("PARALLELISM_CONFIG_DP_SHARD_SIZE")
    assert u.ParallelismConfig().build_device_mesh("cpu") is None


def test_names_without_a_counterpart_say_what_to_use() -> None:
    from engine.interop.accelerate import load_checkpoint_and_dispatch

    with pytest.raises(NotImplementedError, match="strategy='fsdp'"):
        load_checkpoint_and_dispatch(None)
    with pytest.raises(AttributeError, match="nothing_like_this"):
        accelerate.nothing_like_this  # noqa: B018


def test_empty_weights() -> None:
    with accelerate.init_empty_weights():
        module = torch.nn.BatchNorm1d(3)
    assert module.weight.is_meta
    assert not module.running_mean.is_meta  # type: ignore[union-attr]
    model: Any = Accelerator(cpu=True).prepare(module)
    assert torch.equal(model.weight, torch.ones(3))


def test_names_of_hooks_are_accelerates() -> None:
    assert [*u.DDPCommunicationHookType] == [each.value for each in theirs.utils.DDPCommunicationHookType]
    assert {*u.RNGType} >= {each.value for each in theirs.utils.RNGType}
    hook = u.DDPCommunicationHookType("fp16")
    for each in (hook, "fp16", "FP16"):
        assert u.DistributedDataParallelKwargs(comm_hook=each).to_strategy() == {"name": "ddp", "comm_hook": "fp16"}
    none = u.DistributedDataParallelKwargs(comm_hook=u.DDPCommunicationHookType.NO, comm_wrapper="no")
    assert none.to_strategy() == {"name": "ddp", "comm_hook": None}


def test_nested_values_are_logged(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.log({"a": {"x": 1.0, "y": {"z": 2.0}}, "b": 3.0}, step=4)
    accelerator.end_training()
    [events] = tmp_path.rglob("events.*")
    found = EventAccumulator(str(events)).Reload()
    assert {name: [(e.step, e.value) for e in found.Scalars(name)] for name in ("a/x", "a/y/z", "b")} == {
        "a/x": [(4, 1.0)],
        "a/y/z": [(4, 2.0)],
        "b": [(4, 3.0)],
    }


def test_helpers_for_files_and_models(tmp_path: Path) -> None:
    u.save({"x": torch.ones(2), "n": np.arange(3, dtype=np.uint32)}, tmp_path / "x.bin")
    for load in (u.load, theirs.utils.load):
        found = load(tmp_path / "x.bin", map_location="cpu")
        assert (found["x"].tolist(), found["n"].tolist()) == ([1.0, 1.0], [0, 1, 2])
    u.save({"x": torch.ones(2)}, tmp_path / "x.safetensors", safe_serialization=True)
    assert load_file(tmp_path / "x.safetensors")["x"].tolist() == [1.0, 1.0]
    (tmp_path / "code").write_bytes(pickle.dumps(Path("x"), protocol=2))
    with pytest.raises(pickle.UnpicklingError):
        u.load(tmp_path / "code")
    model = torch.nn.Linear(1, 1)
    assert u.extract_model_from_parallel(Accelerator(cpu=True).prepare(model), recursive=True) is model
    assert u.extract_model_from_parallel(torch.nn.DataParallel(model)) is model
    model._original_forward, model.forward = model.forward, u.convert_outputs_to_fp32(model.forward)
    assert "forward" in vars(u.extract_model_from_parallel(model))
    assert pickle.loads(pickle.dumps(u.extract_model_from_parallel(model, keep_fp32_wrapper=False)))(torch.ones(1, 1))
    u.wait_for_everyone()


@pytest.mark.parametrize(
    "data",
    [
        [torch.ones(2, 3), torch.zeros(1, 3)],
        [{"a": torch.ones(2), "b": (torch.ones(1), torch.zeros(2))}, {"a": torch.ones(1), "b": (torch.ones(1), torch.zeros(1))}],
        [[torch.ones(1)], [torch.zeros(3)]],
    ],
)  # fmt: skip
def test_concatenate_is_accelerates(data: Any) -> None:
    torch.testing.assert_close(u.concatenate(data), theirs.utils.operations.concatenate(data))
    assert u.concatenate(["text"]) == theirs.utils.operations.concatenate(["text"]) == "text"


def test_versions_are_compared() -> None:
    for operation, version in ((">=", "2.0"), ("<", "2.0"), ("==", torch.__version__.partition("+")[0]), ("<=", "99")):
        assert u.is_torch_version(operation, version) is theirs.utils.is_torch_version(operation, version)
    assert u.compare_versions("torch", ">", "1.0")
    with pytest.raises(ValueError, match=r"operation='~='.*possible are >"):
        u.is_torch_version("~=", "2.0")


def steps(accelerator: Any) -> list[int]:
    """``accelerator.step`` in each micro-batch of two epochs of five, with windows of two."""
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(torch.ones(5, 1))
    )
    numbers = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                numbers.append(accelerator.step)
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
    return numbers


@pytest.mark.parametrize("rules", ["exact", "accelerate"])
def test_step_counts_micro_batches_as_there(rules: str) -> None:
    expected = steps(theirs.Accelerator(cpu=True, gradient_accumulation_steps=2))
    assert expected == [1, 2, 3, 4, 0] * 2
    assert steps(Accelerator(cpu=True, gradient_accumulation_steps=2, rules=rules)) == expected
