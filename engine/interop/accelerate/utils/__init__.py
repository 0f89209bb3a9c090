"""The helpers of all modules of ``accelerate.utils``."""

from __future__ import annotations

from engine.compat.accelerate.big_modeling import init_empty_weights as init_empty_weights
from engine.compat.accelerate.data_loader import skip_first_batches as skip_first_batches
from engine.compat.accelerate.utils import dataclasses as dataclasses
from engine.compat.accelerate.utils import environment as environment
from engine.compat.accelerate.utils import imports as imports
from engine.compat.accelerate.utils import memory as memory
from engine.compat.accelerate.utils import modeling as modeling
from engine.compat.accelerate.utils import operations as operations
from engine.compat.accelerate.utils import other as other
from engine.compat.accelerate.utils import random as random
from engine.compat.accelerate.utils import versions as versions
from engine.compat.accelerate.utils.imports import available as available
from engine.compat.accelerate.utils.modeling import load_checkpoint_in_model as load_checkpoint_in_model
from engine.compat.accelerate.utils.other import extract_model_from_parallel as extract_model_from_parallel
from engine.compat.accelerate.utils.other import is_peft_model as is_peft_model
from engine.compat.accelerate.utils.other import load as load
from engine.compat.accelerate.utils.other import save as save
from engine.compat.accelerate.utils.other import wait_for_everyone as wait_for_everyone
from engine.compat.accelerate.utils.random import set_seed as set_seed
from engine.compat.accelerate.utils.random import synchronize_rng_states as synchronize_rng_states
from engine.compat.accelerate.utils.tqdm import tqdm as tqdm
from engine.compat.accelerate.utils.versions import compare_versions as compare_versions
from engine.compat.accelerate.utils.versions import is_torch_version as is_torch_version
from engine.interop import moved

moved(__name__, "engine.compat.accelerate.utils")
for _module in (dataclasses, environment, memory, operations):
    globals().update(
        {name: value for name, value in vars(_module).items() if getattr(value, "__module__", "").startswith("engine.")}
    )

SAFE_WEIGHTS_NAME = "model.safetensors"
WEIGHTS_NAME = "pytorch_model.bin"
