"""What ``on_save_checkpoint`` and ``on_load_checkpoint`` get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.toys import Weight, fit, ones

from callbacks import ModelCheckpoint


class Keeps(Weight):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.read: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = [checkpoint["global_step"], checkpoint["epoch"]]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read = (
            dict(checkpoint),
            checkpoint["global_step"],
            checkpoint.get("epoch"),
            checkpoint["hyper_parameters"],
        )
        assert "state_dict" not in checkpoint
        assert checkpoint.get("other", 5) == 5
        with pytest.raises(KeyError, match=r"weights are stored apart.*override state_dict\(\)"):
            _ = checkpoint["state_dict"]
        with pytest.raises(KeyError, match=r"^'other'$"):
            _ = checkpoint["other"]


def test_own_entries_and_the_checkpoints_numbers(tmp_path: Path) -> None:
    result = fit(tmp_path, callbacks=ModelCheckpoint()).run(Keeps(), ones(3))
    again = Keeps()
    fit(tmp_path, max_epochs=2).run(again, ones(3), resume="last")
    expected = ({"mine": [3, 0]}, 3, 0, {"width": 3})
    assert again.read == expected
    assert result.last_checkpoint is not None
    assert Keeps.load_from_checkpoint(result.last_checkpoint).read == expected


@pytest.mark.parametrize("name", ["state_dict", "epoch", "optimizer_states"])
def test_what_the_run_stores_cannot_be_set(tmp_path: Path, name: str) -> None:
    class Sets(Weight):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint[name] = {}

    with pytest.raises(KeyError, match=rf"checkpoint\['{name}'\] cannot be set: "):
        fit(tmp_path, callbacks=ModelCheckpoint()).run(Sets(), ones(1))


def test_a_state_dict_that_leaves_something_out(tmp_path: Path) -> None:
    class Partly(Weight):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frozen", Weight().w.detach() + 7)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name != "frozen"}

    module = Partly()
    result = fit(tmp_path, callbacks=ModelCheckpoint()).run(module, ones(2))
    assert result.last_checkpoint is not None
    loaded = Partly.load_from_checkpoint(result.last_checkpoint)
    assert (loaded.w.item(), loaded.frozen.item()) == (-2.0, 7.0)
    with pytest.raises(ValueError, match="frozen"):
        type("Whole", (Partly,), {"state_dict": Weight.state_dict}).load_from_checkpoint(result.last_checkpoint)


def test_a_module_that_loads_by_itself(tmp_path: Path) -> None:
    class Renames(Weight):
        def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            return super().load_state_dict({name: value * 10 for name, value in state_dict.items()}, *args, **kwargs)

    result = fit(tmp_path, callbacks=ModelCheckpoint()).run(Weight(), ones(2))
    assert result.last_checkpoint is not None
    assert Renames.load_from_checkpoint(result.last_checkpoint).w.item() == -20.0
    module = Renames()
    fit(tmp_path, max_epochs=2).run(module, ones(2), resume="last")
    assert module.w.item() == -22.0


def test_a_state_dict_that_a_save_cannot_call(tmp_path: Path) -> None:
    class Bare(Weight):
        def state_dict(self) -> Any:  # type: ignore[override]
            return {}

    with pytest.raises(TypeError, match=r"Bare.state_dict\(\) cannot be called.*keep_vars=True"):
        fit(tmp_path).run(Bare(), ones(1))
