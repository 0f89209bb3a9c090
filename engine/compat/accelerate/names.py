"""Accelerate's functions and classes that have no counterpart of the same kind: what to use instead."""

from __future__ import annotations

ELSEWHERE = {
    **dict.fromkeys(
        (
            "load_checkpoint_and_dispatch",
            "load_checkpoint_in_model",
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
    "LocalSGD": "synchronize in every step, or average parameters yourself",
}
