"""Accelerate's files, written by Accelerate's own code, as settings of ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.internals import resolved_settings

from engine import strategies
from engine.cli.main import main
from engine.compat.accelerate import config_file as accelerate_file
from engine.config.resolve import Resolved
from engine.step.precision import Precision
from engine.strategies.base import Single
from engine.strategies.ddp import DDP
from engine.strategies.deepspeed import DeepSpeed
from engine.strategies.fsdp import FSDP
from engine.strategies.mesh_parallel import MeshParallel
from engine.transforms.float8 import FP8

config_args = pytest.importorskip("accelerate.commands.config.config_args")

BASE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "mixed_precision": "no",
    "use_cpu": False,
    "debug": False,
    "num_processes": 4,
    "gpu_ids": "all",
    "rdzv_backend": "static",
    "same_network": True,
}
FSDP1 = {
    "fsdp_version": 1,
    "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_offload_params": True,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "GPT2Block,Other",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_forward_prefetch": False,
    "fsdp_use_orig_params": True,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": True,
}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": False,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 2000000,
    "fsdp_state_dict_type": "FULL_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_activation_checkpointing": False,
}
ZERO2 = {
    "zero_stage": 2,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "none",
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "zero3_init_flag": False,
}
ZERO3 = {
    "zero_stage": 3,
    "offload_optimizer_device": "nvme",
    "offload_param_device": "nvme",
    "offload_optimizer_nvme_path": "/fast",
    "offload_param_nvme_path": "/fast",
    "gradient_accumulation_steps": 1,
    "zero3_save_16bit_model": True,
    "zero3_init_flag": True,
}
MEGATRON = {
    "megatron_lm_tp_degree": 2,
    "megatron_lm_sequence_parallelism": True,
    "megatron_lm_pp_degree": 2,
    "megatron_lm_num_micro_batches": 4,
    "megatron_lm_recompute_activations": True,
    "megatron_lm_use_distributed_optimizer": False,
    "megatron_lm_gradient_clipping": 2.0,
}
AXES = {
    "parallelism_config_dp_replicate_size": 2,
    "parallelism_config_dp_shard_size": 2,
    "parallelism_config_tp_size": 2,
    "parallelism_config_cp_size": 1,
}


def theirs(path: Path, **changes: Any) -> Path:
    """A file as ``accelerate config`` writes it."""
    values = {key: value for key, value in {**BASE, **changes}.items() if value is not None or key == "mixed_precision"}
    config = config_args.ClusterConfig(**values)
    config.to_json_file(path) if path.suffix == ".json" else config.to_yaml_file(path)
    return path


def taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str, name: str = "theirs.yaml", **changes: Any
) -> tuple[Resolved, str]:
    """What ``fit config`` makes of such a file, read back."""
    out = tmp_path / "fit.yaml"
    source = theirs(tmp_path / name, **changes)
    status = main(["config", "--from-accelerate", str(source), "--output", str(out), *options])
    assert status == 0, capsys.readouterr().err
    found = resolved_settings({}, {}, out)
    strategies.requested(found.settings, found.origins)
    return found, out.read_text()


@pytest.mark.parametrize(
    ("changes", "strategy", "others"),
    [
        ({"distributed_type": "NO", "num_processes": 1}, Single(), {"accelerator": "auto", "devices": 1}),
        ({"distributed_type": "MULTI_CPU", "use_cpu": True}, DDP(), {"accelerator": "cpu", "devices": 4}),
        ({"mixed_precision": "bf16"}, DDP(), {"accelerator": "cuda", "devices": 4, "precision": "bf16-mixed"}),
        ({"distributed_type": "MULTI_XPU"}, DDP(), {"accelerator": "xpu", "devices": 4}),
        (
            {"gpu_ids": "0,2,3,5", "mixed_precision": "fp16", "debug": True},
            DDP(),
            {"devices": (0, 2, 3, 5), "precision": "16-mixed", "debug": True},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": FSDP1},
            FSDP(blocks=["GPT2Block", "Other"], cpu_offload=True),
            {"activation_checkpointing": "full", "accelerator": "gpu"},
        ),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": FSDP1 | {"fsdp_reshard_after_forward": "HYBRID_SHARD_ZERO2"},
                "num_machines": 2,
                "main_process_ip": "10.0.0.1",
                "main_process_port": 29501,
            },
            FSDP(blocks=["GPT2Block", "Other"], cpu_offload=True, reshard_after_forward=False, dp_replicate=2),
            {"devices": "auto"},
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}, DDP(), {}),
        (
            {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": 2}},
            FSDP(reshard_after_forward=False),
            {},
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": FSDP2},
            FSDP(reshard_after_forward=False, min_size=2000000),
            {"activation_checkpointing": None},
        ),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": FSDP2 | {"fsdp_auto_wrap_policy": "NO_WRAP"},
                "parallelism_config": AXES,
                "num_processes": 8,
            },
            MeshParallel(reshard_after_forward=False, dp_replicate=2, dp_shard=2, tp=2),
            {"devices": 8},
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO2},
            DeepSpeed(stage=2, offload_optimizer="cpu"),
            {"accumulate_grad_batches": 8, "gradient_clip_val": 0.5},
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO3, "mixed_precision": "bf16"},
            DeepSpeed(stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path="/fast"),
            {"precision": "bf16-mixed", "gradient_clip_val": None},
        ),
        (
            {"distributed_type": "MEGATRON_LM", "megatron_lm_config": MEGATRON},
            MeshParallel(tp=2, pp=2, num_microbatches=4, sequence_parallel=True, dp_replicate=-1, dp_shard=1),
            {"activation_checkpointing": "selective", "gradient_clip_val": 2.0},
        ),
        (
            {
                "dynamo_config": {
                    "dynamo_backend": "INDUCTOR",
                    "dynamo_mode": "max-autotune",
                    "dynamo_use_regional_compilation": True,
                }
            },
            DDP(),
            {"compile": {"backend": "inductor", "dynamic": False, "mode": "max-autotune", "blocks": True}},
        ),
        ({"dynamo_config": {"dynamo_backend": "NO"}}, DDP(), {"compile": False}),
    ],
)
def test_its_settings_are_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], strategy: Any, others: dict[str, Any]
) -> None:
    found, _ = taken_over(tmp_path, capsys, **changes)
    got = strategies.get(found.settings.strategy)
    assert type(got) is type(strategy)
    assert strategies.describe(got, None) == strategies.describe(strategy, None)
    assert {name: getattr(found.settings, name) for name in others} == others


@pytest.mark.parametrize(
    ("fp8", "expected"),
    [
        (None, FP8()),
        ({"backend": "AO", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": True}, FP8(all_gather=False)),
    ],
)
def test_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str], fp8: dict[str, Any] | None, expected: FP8) -> None:
    found, _ = taken_over(tmp_path, capsys, mixed_precision="fp8", fp8_config=fp8)
    assert Precision.parse(found.settings.precision).fp8 == expected


def test_a_file_of_deepspeed_says_its_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "gradient_clipping": 0.25})
    )
    config = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": False}
    found, _ = taken_over(tmp_path, capsys, distributed_type="DEEPSPEED", deepspeed_config=config, mixed_precision=None)
    got = strategies.get(found.settings.strategy)
    assert isinstance(got, DeepSpeed)
    assert (got.zero_stage, found.settings.precision) == (1, "bf16-mixed")


def test_machines_are_the_launchers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, text = taken_over(
        tmp_path,
        capsys,
        num_machines=2,
        num_processes=16,
        machine_rank=1,
        main_process_ip="10.0.0.1",
        main_process_port=29501,
        rdzv_backend="c10d",
    )
    assert "fit launch --nproc 8 --nnodes 2 --rdzv 10.0.0.1:29501 script.py" in text
    assert "machine_rank: 1: is found at the rendezvous" in text
    assert (found.settings.devices, found.settings.num_nodes) == ("auto", 1)


def test_what_has_no_meaning_is_told_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = taken_over(
        tmp_path, capsys, name="theirs.json", distributed_type="FSDP", fsdp_config=FSDP1, mixed_precision="bf16"
    )
    assert "Accelerate reduces FSDP's gradients in bfloat16; here fp32 is used" in text
    assert "#     fsdp_config.fsdp_backward_prefetch: BACKWARD_PRE: FSDP 2 fetches ahead by itself" in text
    assert "#     fsdp_config.fsdp_use_orig_params: True: FSDP 2 always keeps" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distributed_type": "MULTI_MLU"}, r"theirs.yaml:\d+: distributed_type: MULTI_MLU: has no counterpart"),
        (
            {"distributed_type": "FSDP", "fsdp_config": FSDP2 | {"fsdp_activation_checkpointing_offload": True}},
            "no offload of activations",
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": FSDP2 | {"fsdp_ignored_modules": "head.*"}},
            "name their parameters in strategy.ignore",
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": FSDP1 | {"fsdp_sharding_strategy": "NO_SHARD"}},
            "contradicts fsdp_sharding_strategy: NO_SHARD",
        ),
        (
            {"distributed_type": "FSDP", "fsdp_config": FSDP2 | {"fsdp_ofload_params": True}},
            r"theirs.yaml:\d+: 'fsdp_config.fsdp_ofload_",
        ),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": FSDP2,
                "parallelism_config": AXES | {"parallelism_config_cp_size": 2},
            },
            "context parallel is not supported",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO2 | {"deepspeed_moe_layer_cls_names": "Moe"}},
            "mixtures of experts",
        ),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "nowhere.json"}},
            "the file does not exist",
        ),
        (
            {
                "distributed_type": "MEGATRON_LM",
                "megatron_lm_config": MEGATRON | {"megatron_lm_attention_dropout": 0.1},
            },
            "belongs to the model",
        ),
        (
            {"mixed_precision": "fp8", "fp8_config": {"backend": "MSAMP", "optimization_level": "O2"}},
            "has no counterpart",
        ),
        (
            {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "margin": 3}},
            "TE: has no counterpart; possible: AO",
        ),
        ({"gpu_ids": "0,1"}, "names 2 devices for 4 processes"),
        ({"tpu_name": "pod"}, "is for TPUs"),
    ],
)
def test_what_would_change_the_training_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    source = theirs(tmp_path / "theirs.yaml", **changes)
    assert main(["config", "--from-accelerate", str(source), "--output", str(tmp_path / "fit.yaml")]) == 2
    error = capsys.readouterr().err
    assert "--force" in error
    assert re.search(message, error), error
    assert not (tmp_path / "fit.yaml").exists()


def test_force_writes_them_as_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO2 | {"deepspeed_moe_layer_cls_names": "Moe"}}
    found, text = taken_over(tmp_path, capsys, "--force", **changes)
    assert "NOT DONE HERE" in text
    assert "deepspeed_config.deepspeed_moe_layer_cls_names: Moe: mixtures of experts are not supported" in text
    assert found.settings.strategy.options["stage"] == 2


def test_every_key_of_accelerate_is_known(tmp_path: Path) -> None:
    """A key that a later version adds is refused, so this list is the test that we have looked at each."""
    given: dict[str, Any] = dict.fromkeys(config_args.ClusterConfig.__dataclass_fields__)
    file = accelerate_file.read(_written(tmp_path, given | {"distributed_type": "NO"}))
    assert [line for line in file.refused if "is not known" in line] == []


def _written(tmp_path: Path, values: dict[str, Any]) -> Path:
    path = tmp_path / "all.yaml"
    path.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items()))
    return path


def test_accelerates_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for environ, folder in (
        ({"HF_HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/a/accelerate"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/huggingface/accelerate"),
        ({}, str(Path("~/.cache/huggingface/accelerate").expanduser())),
    ):
        assert str(accelerate_file.default_path(environ)) == f"{folder}/default_config.yaml"
    assert Path(config_args.default_config_file).name == "default_config.yaml"


@pytest.mark.parametrize(
    "text", ["a: 1", "- 1", "", "distributed_type: !!python/object/apply:os.system ['touch pwned']"]
)
def test_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(text)
    assert main(["config", "--from-accelerate", "theirs.yaml"]) == 2
    assert "theirs.yaml" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.yaml"]


def test_the_file_of_accelerate_config_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON under the name of a YAML file, at the place where it is looked for."""
    default = pytest.importorskip("accelerate.commands.config.default")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    default.write_basic_config("bf16", str(tmp_path / "accelerate" / "default_config.yaml"))
    assert main(["config", "--from-accelerate"]) == 0
    found = resolved_settings({}, {})
    assert (found.settings.precision, found.settings.strategy, found.settings.devices) == ("bf16-mixed", "auto", 1)
