"""Files that show who has written a folder, and what to do with it, for errors about a checkpoint that is not there."""

_CONVERT = "fit checkpoint convert FOLDER OUT makes a checkpoint of its weights"
_DEEPSPEED = (
    "it looks like a checkpoint of DeepSpeed: zero_to_fp32.py, which DeepSpeed writes into it, makes a file of its weights, and "
    "fit checkpoint convert FILE OUT a checkpoint of that"
)
_ACCELERATE = f"it looks like a checkpoint of Accelerate: {_CONVERT}"
_HUGGING_FACE = f"it looks like a model of Hugging Face: {_CONVERT}"

FOLDER_FILES = {
    "latest": _DEEPSPEED,
    "zero_to_fp32.py": _DEEPSPEED,
    "mp_rank_00_model_states.pt": _DEEPSPEED,
    ".metadata": f"it looks like a checkpoint of torch.distributed.checkpoint: {_CONVERT}, with --trust-pickle",
    "optimizer.bin": _ACCELERATE,
    "random_states_0.pkl": _ACCELERATE,
    "trainer_state.json": f"it looks like a checkpoint of transformers' Trainer: {_CONVERT}",
    "config.json": _HUGGING_FACE,
    "model.safetensors.index.json": _HUGGING_FACE,
    "hparams.yaml": "it looks like a folder of Lightning: fit checkpoint convert FILE.ckpt OUT makes a checkpoint of one of its files",
}
"""File's name -> sentence."""
