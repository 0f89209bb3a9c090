"""Names of Accelerate that this library's counterparts lack, and what to use instead."""

from __future__ import annotations

from dataclasses import dataclass

from engine.compat.table_rows import Argument, called


@dataclass(frozen=True)
class AcceleratorArgument(Argument):
    """An argument of ``Accelerator``, with advice for users who pass it to ``Fit`` (``setting``, ``instead``) or ``Engine`` (``engine``)."""

    engine: str = ""
    """The advice in errors of ``Engine``, if it differs from that of ``Fit``."""


_DIVIDED = "samples are divided exactly among the ranks; see global_batch_size"
_DEEPSPEED = "here it is strategy={'name': 'deepspeed', 'stage': 2, ...}"
_MESH = "here it is strategy={'name': 'mesh', 'tp': 2, ...}"
_PATHS = "give a path to save_state and load_state"
_NO_PICKLE = "nothing in a checkpoint is unpickled, so this is always true: leave it out"
_SAFETENSORS = "weights are always written as safetensors: leave it out"
_LAUNCHER = "the launcher starts the processes: fit launch, torchrun, or engine.launch"
_DEVICE = "prepared objects are on their device"
ACCELERATOR = {
    "device_placement": AcceleratorArgument(
        True, instead="everything prepared is on its device; choose it with accelerator and devices"
    ),
    "split_batches": AcceleratorArgument(instead=_DIVIDED),
    "mixed_precision": AcceleratorArgument(setting="precision"),
    "gradient_accumulation_steps": AcceleratorArgument(1, setting="accumulate_grad_batches"),
    "cpu": AcceleratorArgument(False, instead="here it is accelerator='cpu'"),
    "dataloader_config": AcceleratorArgument(instead="the DataLoader that you give keeps its own settings"),
    "deepspeed_plugin": AcceleratorArgument(instead=_DEEPSPEED),
    "fsdp_plugin": AcceleratorArgument(instead="here it is strategy={'name': 'fsdp', ...}"),
    "torch_tp_plugin": AcceleratorArgument(engine=_MESH),
    "megatron_lm_plugin": AcceleratorArgument(instead=_MESH),
    "rng_types": AcceleratorArgument(
        instead="random numbers of every rank are in checkpoints, and seed determines the data's order"
    ),
    "log_with": AcceleratorArgument(
        instead="loggers are callbacks, for example callbacks=[CSVLogger()]",
        engine="your own loop calls and logs directly; engine.Fit has callbacks",
    ),
    "project_dir": AcceleratorArgument(setting="root_dir", engine=_PATHS),
    "project_config": AcceleratorArgument(instead="here it is root_dir", engine=_PATHS),
    "gradient_accumulation_plugin": AcceleratorArgument(instead="here it is accumulate_grad_batches"),
    "step_scheduler_with_optimizer": AcceleratorArgument(
        True,
        instead="schedulers step once per step that happened; in Fit, 'interval' in configure_optimizers sets when",
        engine="a prepared scheduler steps when the optimizer did",
    ),
    "kwargs_handlers": AcceleratorArgument(
        instead="arguments of DDP, FSDP and the scaler are fields of strategy={'name': 'ddp', ...} and precision={'name': ...}"
    ),
    "dynamo_backend": AcceleratorArgument(setting="compile"),
    "dynamo_plugin": AcceleratorArgument(
        instead="here it is compile: True, 'blocks', or a dict of torch.compile's options"
    ),
    "deepspeed_plugins": AcceleratorArgument(instead=_DEEPSPEED),
    "parallelism_config": AcceleratorArgument(instead=_MESH),
    # of its files, and of earlier versions
    "num_processes": AcceleratorArgument(setting="devices", engine=_LAUNCHER),
    "num_machines": AcceleratorArgument(setting="num_nodes", engine=_LAUNCHER),
    "gradient_clipping": AcceleratorArgument(setting="gradient_clip_val"),
    "logging_dir": AcceleratorArgument(setting="root_dir"),
    "dispatch_batches": AcceleratorArgument(instead=_DIVIDED),
    "even_batches": AcceleratorArgument(instead=_DIVIDED),
    "max_grad_norm": AcceleratorArgument(
        engine="call engine.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()"
    ),
}
"""The arguments of ``Accelerator``, in the order of its signature, then those of its files and earlier versions."""
SETTINGS = {name: argument.setting for name, argument in ACCELERATOR.items() if argument.setting}
OTHERWISE = {name: argument.instead for name, argument in ACCELERATOR.items() if argument.instead}
CALLS: dict[str, dict[str, str]] = {
    "Engine.__init__": {name: argument.engine for name, argument in ACCELERATOR.items() if argument.engine},
    "Engine.prepare": {
        "device_placement": f"{_DEVICE}; prepare_data_loader(loader, place=False) leaves batches where they are",
        "move_to_device": f"{_DEVICE}: leave it out",
    },
    "Engine.prepare_model": {
        "device_placement": f"{_DEVICE}: leave it out",
        "evaluation_mode": "without training: place_model(model)",
    },
    "Engine.prepare_optimizer": {"device_placement": f"{_DEVICE}: leave it out"},
    "Engine.prepare_data_loader": {
        **dict.fromkeys(("data_loader", "dataloader"), called("loader")),
        **dict.fromkeys(("device_placement", "move_to_device"), called("place")),
        "slice_fn_for_dispatch": "samples are divided among the ranks by index: leave it out",
        "use_distributed_sampler": "samples are divided among the ranks for any sampler: leave it out",
    },
    "Engine.skip_first_batches": {"dataloader": called("loader")},
    "Engine.save_state": {"safe_serialization": _SAFETENSORS},
    "Engine.load_state": {"weights_only": _NO_PICKLE},
    "Engine.save_model": {"safe_serialization": _SAFETENSORS},
    "Engine.unwrap_model": {
        **dict.fromkeys(
            ("keep_fp32_wrapper", "keep_torch_compile"),
            "the result is the module that you gave to prepare: leave it out",
        )
    },
    "Engine.gather": {"tensor": called("tree")},
    "Engine.reduce": {"tensor": called("tree"), "reduce_op": called("reduction")},
    "Engine.broadcast": {"tensor": called("tree"), "obj": called("tree"), "src": called("from_process")},
    "Engine.pad_across_processes": {"tensor": called("tree")},
}
"""Our method -> arguments of ``Accelerator``'s counterpart that it lacks -> what to do instead."""
ATTRIBUTES: dict[str, dict[str, str]] = {
    "Engine": {
        "gather_object": "use gather(tree), or gather_for_metrics for objects",
        "save": "use save_state(directory), or torch.save under: if engine.is_main_process",
        "log": "an Engine has no loggers: call your own",
        **dict.fromkeys(("trackers", "init_trackers", "get_tracker"), "an Engine has no trackers: call your own"),
        "end_training": "nothing needs to be closed: leave it out",
        "clear": "use free_memory()",
        "gradient_accumulation_steps": "use accumulate_grad_batches",
        "mixed_precision": "use precision",
        "distributed_type": "use strategy",
        "state": "use process_index, num_processes, device",
        "gradient_state": "use sync_gradients",
        "use_distributed": "use num_processes > 1",
        "on_local_process": "use on_local_main_process",
        "join_uneven_inputs": "a rank without data runs repeated batches that do not count: leave it out",
        "profile": "use torch.profiler.profile()",
        **dict.fromkeys(
            ("register_save_state_pre_hook", "register_load_state_pre_hook"), "use register_for_checkpointing(objects)"
        ),
        "trigger_sync_in_backward": "use accumulate(model)",
        **dict.fromkeys(("project_dir", "logging_dir", "project_configuration"), _PATHS),
        **dict.fromkeys(("deepspeed_plugin", "parallelism_config", "torch_device_mesh"), "use strategy"),
    },
}
"""Our class -> attributes of ``Accelerator`` that it lacks -> what to use instead."""
RENAMED = {"Accelerator": "Engine", "set_seed": "seed_everything"}
"""Accelerate's names -> the names of their counterparts in ``engine``."""
FUNCTIONS = {
    **dict.fromkeys(
        (
            "load_checkpoint_and_dispatch",
            "dispatch_model",
            "cpu_offload",
            "disk_offload",
            "infer_auto_device_map",
        ),
        "a model over several devices of one process: Engine(strategy='fsdp') or 'deepspeed' shards it over processes, and "
        "Engine.load_state or 'fit checkpoint convert' read its weights",
    ),
    **dict.fromkeys(
        ("FP8RecipeKwargs", "AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs"),
        "Engine(precision={'name': 'fp8-mixed', ...})",
    ),
    **dict.fromkeys(
        ("DummyOptim", "DummyScheduler"),
        "an optimizer or a scheduler of your own; in a Fit run, those of DeepSpeed's configuration",
    ),
    "prepare_pippy": "Engine(strategy={'name': 'mesh', 'pp': 2})",
}
"""Accelerate's functions and classes without one of this name here -> what to use instead."""
_HELPER = "Accelerate uses it inside its own Accelerator: copy it into your project, or import it from the installed Accelerate"
_OFFLOAD = FUNCTIONS["dispatch_model"]
PLACES = {
    "": _HELPER,
    "big_modeling.": _OFFLOAD,
    "commands.": "the command here is fit: fit launch starts processes, fit env shows settings, fit launch --config_file reads accelerate's file",
    "hooks.": _OFFLOAD,
    "inference.": FUNCTIONS["prepare_pippy"],
    "parallelism_config.": _MESH,
    "test_utils.": "it is for Accelerate's own tests: import it from the installed Accelerate",
    "tracking.": "give log_with the tracker's name, or an object of a subclass of GeneralTracker",
    "utils.bnb.": "load a quantized model with transformers, and prepare it as any other",
    "utils.deepspeed.": "give Accelerator(deepspeed_plugin=DeepSpeedPlugin(...)), which prepares the objects that you give to prepare",
    "utils.fsdp_utils.": "give Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(...)); save_state and load_state write and read the shards",
    "utils.launch.": "the launcher here is fit launch",
    "utils.megatron_lm.": _MESH,
    "utils.modeling.": _OFFLOAD,
    "utils.offload.": _OFFLOAD,
}
"""Beginning of a module's path in the package ``accelerate`` -> what to use instead of its names that have no counterpart."""
