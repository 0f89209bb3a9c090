"""Checks for what DeepSpeed cannot do, before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from engine.config.settings import Settings
from engine.step.optimizers import Modes
from engine.strategies.base import class_name
from engine.strategies.deepspeed.configuration import OFFLOAD, get, says
from engine.strategies.deepspeed.model import Driven
from engine.utils.errors import nearest
from engine.utils.parameters import parameters_of


def check_names(section: str, names: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> None:
    """Check that every name in a section is one of DeepSpeed's (pydantic) ``fields``, or an alias of one.

    Raises:
        ValueError: it is not; the message names the nearest.
    """
    known = {*fields, *(field.alias for field in fields.values() if field.alias)}
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: {section}.{name} is not a DeepSpeed setting{nearest(name, known)}")


def check_offload(config: dict[str, Any], where: str, stage: int) -> None:
    """Check that only what this stage shards is offloaded.

    Raises:
        ValueError: it is not; or ``overlap_comm`` where nothing is reduced during backward.
    """
    for name, inside in OFFLOAD.items():
        device = get(config, f"zero_optimization.{inside}.device", "none")
        least = 3 if name == "offload_parameters" else 1
        if device != "none" and stage < least:
            what = (
                "parameters are sharded from stage 3"
                if least == 3
                else "stage 0 shards nothing that could be offloaded"
            )
            raise ValueError(
                f"{name}={device!r} with stage {stage} ({where}): {what}; use stage={max(least, 2)}, or leave it out"
            )
    if stage < 2 and get(config, "zero_optimization.overlap_comm") is True:
        raise ValueError(
            f"overlap_comm=True with stage {stage} ({where}): stages 0 and 1 reduce within the step; leave it out"
        )


def check_precision(name: str, stage: int, device: str) -> None:
    """Raise ``ValueError`` for a precision that DeepSpeed does not have at this stage of ZeRO on this kind of device."""
    if name == "64-true":
        raise ValueError(
            "precision='64-true' under DeepSpeed, whose master copies are fp32: use strategy='ddp' or 'fsdp'"
        )
    if name.startswith("16-") and device == "cpu":
        raise ValueError(
            f"precision={name!r} under DeepSpeed on the CPU: its fp16 needs CUDA; use 'bf16-mixed' or '32-true'"
        )
    if name.startswith("16-") and not stage:
        raise ValueError(f"precision={name!r} with stage 0 under DeepSpeed: use stage=1 or higher, or strategy='ddp'")


def check_clipping(settings: Settings, origins: Mapping[str, str]) -> None:
    """Raise ``ValueError`` for clipping that DeepSpeed does not have."""
    if settings.gradient_clip_val is not None and settings.gradient_clip_algorithm == "value":
        raise ValueError(
            f"gradient_clip_algorithm='value' ({origins.get('gradient_clip_algorithm', 'code')}) under DeepSpeed, which clips by norm only: "
            "use 'norm', or strategy='fsdp'"
        )


def check_one_set_of_weights(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` for an optimizer that trains with other weights than those to use afterwards, as schedule-free ones do."""
    if Modes([optimizer]).switched:
        raise ValueError(
            f"{type(optimizer).__name__} has train() and eval(), which swap the weights, and DeepSpeed keeps the weights itself: "
            "use another strategy, or another optimizer"
        )


def check_only_optimizer(optimizer: Optimizer, owners: Sequence[Driven]) -> None:
    """Raise unless this is the only optimizer of one model. ``owners``: the models that have some of its parameters."""
    owner, name = owners[0], type(optimizer).__name__
    if len(owners) > 1 or not {id(p) for p in parameters_of([optimizer])} <= {id(p) for p in owner.parameters()}:
        raise ValueError(
            f"{name} has parameters of several models, or of none that was prepared: under DeepSpeed each model has its own"
        )
    if owner.optimizer is not None:
        raise ValueError(
            f"{name} is a second optimizer of {class_name(owner.module)}: DeepSpeed trains a model with one; give one optimizer "
            "several parameter groups"
        )


def check_no_other(config: Mapping[str, Any], where: str, name: str) -> None:
    """Raise ``ValueError`` if the configuration has an optimizer or a scheduler of its own beside the given optimizer of this name."""
    if says(config, "optimizer"):
        raise ValueError(
            f'{name} was given, and "optimizer" in {where} is {config["optimizer"].get("type")!r}: keep one of them'
        )
    if says(config, "scheduler"):
        raise ValueError(f'"scheduler" in {where} needs "optimizer" there: return yours from configure_optimizers')
