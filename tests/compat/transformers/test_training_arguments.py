"""``TrainingArguments``, written by transformers' own code, as settings and code of ours."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.internals import resolved_settings

from engine.cli.main import main
from engine.compat.transformers import training_arguments as from_training_arguments
from engine.compat.transformers.training_arguments import read
from engine.config.settings import Settings

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    """What ``to_json_string`` writes without any argument."""
    found: dict[str, Any] = json.loads(transformers.TrainingArguments("out", use_cpu=True).to_json_string())
    return found


def write(folder: Path, values: Any) -> Path:
    path = folder / "training_args.json"
    path.write_text(json.dumps(values))
    return path


def test_the_defaults_are_those_of_trainer(defaults: dict[str, Any], tmp_path: Path) -> None:
    found = read(write(tmp_path, defaults | {"use_cpu": False}))
    assert found.refused == []
    assert found.notes == []
    expected = {
        "max_epochs": 3,
        "root_dir": "out",
        "seed": 42,
        "log_every_n_steps": 500,
        "val_every": None,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": 1.0,
    }
    assert found.settings == expected
    assert found.module == {
        "optimizer": "adamw",
        "lr": 5e-5,
        "weight_decay": 0.0,
        "scheduler": "linear",
        "warmup": 0,
        "optimizer_args": {"fused": True},
    }
    assert found.loader | {"pin_memory": True} == {"batch_size": 8, "shuffle": True, "pin_memory": True}
    assert found.callbacks == ["ModelCheckpoint(every='500 steps', save_top_k=-1)"]
    few = read(write(tmp_path, {"output_dir": "out"}))  # what is not given has Trainer's default
    assert few.settings == expected


def test_every_field_is_known(defaults: dict[str, Any]) -> None:
    """Those that an installed version has, whatever their value."""
    known = set(defaults)
    assert known == {field.name for field in fields(transformers.TrainingArguments) if field.init}
    found = from_training_arguments.Arguments(defaults, "here", {})
    assert found.values.keys() == known


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_steps": 100, "num_train_epochs": 2}, {"max_steps": 100}),
        ({"gradient_accumulation_steps": 4, "max_grad_norm": 0}, {"accumulate_grad_batches": 4, "gradient_clip_val": None}),
        ({"bf16": True, "tf32": False}, {"precision": "bf16-mixed", "matmul_precision": "highest"}),
        ({"fp16": True}, {"precision": "16-mixed"}),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}, {"activation_checkpointing": "full"}),
        ({"torch_compile": True, "torch_compile_mode": "max-autotune"}, {"compile": {"mode": "max-autotune"}}),
        ({"torch_compile": True}, {"compile": True}),
        ({"full_determinism": True, "no_cuda": True}, {"deterministic": True, "accelerator": "cpu"}),
        ({"eval_strategy": "steps", "eval_steps": 20}, {"val_every": "20 steps"}),
        ({"eval_strategy": "steps", "logging_steps": 30}, {"val_every": "30 steps", "log_every_n_steps": 30}),
        ({"evaluation_strategy": "epoch"}, {"val_every": "1 epochs"}),
        ({"eval_strategy": "steps", "eval_steps": 0.25, "max_steps": 100}, {"val_every": "25 steps"}),
        ({"logging_strategy": "epoch"}, {"log_every_n_steps": 0}),
        ({"load_best_model_at_end": True}, {"reload_best": True}),
        ({"ddp_timeout": 60}, {"timeout": "60 s"}),
        ({"ddp_find_unused_parameters": True}, {"strategy": {"name": "ddp", "find_unused_parameters": True}}),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, {"strategy": {"name": "deepspeed", "config": {"zero_optimization": {"stage": 3}}}}),
        (
            {"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}},
            {"strategy": {"name": "fsdp", "cpu_offload": True, "blocks": ["LlamaDecoderLayer"]}},
        ),
        ({"fsdp": "shard_grad_op"}, {"strategy": {"name": "fsdp", "reshard_after_forward": False}}),
    ],
)  # fmt: skip
def test_settings(given: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, {"output_dir": "out", **given})
    found = read(path)
    assert found.refused == []
    assert found.settings.items() >= expected.items()
    assert ("max_epochs" in found.settings) == ("max_steps" not in given)
    if "deepspeed" not in given and "deterministic" not in expected:
        settings = Settings(**found.settings)  # possible as they are
        assert settings.root_dir == Path("out")


@pytest.mark.parametrize(
    ("given", "module", "loader"),
    [
        ({"optim": "sgd", "learning_rate": 0.1}, {"optimizer": "sgd", "lr": 0.1}, {}),
        ({"optim": "adamw_torch", "adam_beta2": 0.95, "adam_epsilon": 1e-6}, {"optimizer_args": {"betas": (0.9, 0.95), "eps": 1e-6}}, {}),
        ({"lr_scheduler_type": "cosine", "warmup_ratio": 0.1}, {"scheduler": "cosine", "warmup": 0.1}, {}),
        ({"warmup_steps": 10, "weight_decay": 0.1}, {"warmup": 10, "weight_decay": 0.1}, {}),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, {"scheduler": "constant", "warmup": 0}, {}),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}}, {"scheduler_args": {"num_cycles": 2}}, {}),
        ({"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}, {}, {"shuffle": False, "batch_size": 2}),
        ({"dataloader_num_workers": 2, "dataloader_drop_last": True}, {}, {"num_workers": 2, "drop_last": True}),
    ],
)  # fmt: skip
def test_code(given: dict[str, Any], module: dict[str, Any], loader: dict[str, Any], tmp_path: Path) -> None:
    found = read(write(tmp_path, {"output_dir": "out", **given}))
    assert found.refused == []
    assert found.module.items() >= module.items()
    assert found.loader.items() >= loader.items()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"save_strategy": "no"}, []),
        ({"save_strategy": "epoch", "save_total_limit": 1}, ["ModelCheckpoint(every='1 epochs')"]),
        (
            {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "eval_accuracy", "save_total_limit": 3},
            ["ModelCheckpoint(every='1 epochs', monitor='val/accuracy', mode='max', save_top_k=2)"],
        ),
        ({"save_strategy": "no", "report_to": ["tensorboard", "wandb"]}, ["TensorBoardLogger()", "WandbLogger()"]),
    ],
)  # fmt: skip
def test_callbacks(given: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    found = read(write(tmp_path, {"output_dir": "out", **given}))
    assert found.refused == []
    assert found.callbacks == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"label_smoothing_factor": 0.1}, "examples/causal_lm.py"),
        ({"neftune_noise_alpha": 5}, "examples/causal_lm.py"),
        ({"train_sampling_strategy": "group_by_length"}, "examples/causal_lm.py"),
        ({"num_train_epochs": 1.5}, "max_steps"),
        ({"bf16": True, "fp16": True}, "contradicts"),
        ({"data_seed": 7}, "seed: 42"),
        ({"optim": "galore_adamw"}, "HFModule"),
        ({"eval_strategy": "steps", "eval_steps": 0.1}, "number of steps"),
        ({"save_total_limit": 3}, "keep_every"),
        ({"average_tokens_across_devices": False}, "all ranks"),
        ({"push_to_hub": True}, "fit checkpoint export"),
        ({"report_to": "comet_ml"}, "tensorboard"),
        ({"fsdp": "half_shard"}, "half_shard"),
        ({"learning_rat": 0.1}, "did you mean 'learning_rate'"),
        ({"accelerator_config": {"split_batches": True}}, "global_batch_size"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_is_an_error_that_names_one(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    found = read(write(tmp_path, {"output_dir": "out", **given}))
    assert len(found.refused) == 1
    assert said in found.refused[0]
    assert next(iter(given)) in found.refused[0] or "train_sampling_strategy" in given or "eval_strategy" in given


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("args.yaml").write_text("output_dir: out\nlearning_rate: 1.0e-4\nnum_train_epochs: 2\nhub_model_id: me/mine\n")
    assert main(["config", "--from-training-args", "args.yaml"]) == 0
    text = Path("fit.yaml").read_text()
    assert "lr=0.0001" in text
    assert resolved_settings({}, {}, Path("fit.yaml")).settings.max_epochs == 2
    Path("args.yaml").write_text("output_dir: out\nneftune_noise_alpha: 5\n")
    assert main(["config", "--from-training-args", "args.yaml", "--output", "b.yaml"]) == 2
    assert "neftune_noise_alpha: 5" in capsys.readouterr().err
    assert not Path("b.yaml").exists()
    assert main(["config", "--from-training-args", "args.yaml", "--output", "b.yaml", "--force"]) == 0
    assert "NOT DONE HERE" in Path("b.yaml").read_text()


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ValueError, match="to_json_string"):
        read(tmp_path / "training_args.bin")
    with pytest.raises(ValueError, match="output_dir"):
        read(write(tmp_path, {"max_epochs": 1}))
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing.json")
