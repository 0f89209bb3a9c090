"""Names the functions of this annex that answer the questions of :mod:`engine.utils.extensions`. None is imported here: some need other trainers."""

from engine.utils.extensions import Answers

ANSWERS = Answers(
    adapters={
        "lightning": "engine.compat.lightning.adapters:adapt",
        "pytorch_lightning": "engine.compat.lightning.adapters:adapt",
        "transformers": "engine.compat.transformers.module:as_module",
        "peft": "engine.compat.transformers.module:as_module",
    },
    guards={"transformers.modeling_utils": "engine.compat.transformers.packed_rows:guard_model"},
    run_attributes={"trainer": "engine.compat.lightning.trainer_view:TrainerView"},
    advice="engine.compat.hints:advice",
    add_advice="engine.compat.hints:add_advice",
    explain_call="engine.compat.hints:explain_call",
    refuse_uncalled="engine.compat.lightning.checks:refuse_replaced",
)
