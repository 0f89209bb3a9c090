from __future__ import annotations

from pathlib import Path

from engine import Result


def test_a_result_as_text():
    result = Result("completed", "max_steps=20 reached", 2, 20, {"train/loss": 0.12345678, "val/accuracy": 1.0})
    assert str(result).splitlines() == [
        "completed (max_steps=20 reached): 2 epochs, 20 steps",
        "train/loss 0.123457",
        "val/accuracy 1",
    ]
    result = Result("interrupted", "", 0, 3, {}, best_checkpoint="s3://bucket/best", last_checkpoint=Path("runs/last"))
    assert (
        str(result) == "interrupted: 0 epochs, 3 steps\nlast checkpoint: runs/last\nbest checkpoint: s3://bucket/best"
    )
