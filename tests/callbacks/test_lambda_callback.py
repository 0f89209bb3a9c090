from __future__ import annotations

import pytest

from callbacks import LambdaCallback


def test_each_function_is_called_at_its_event(make_fit, scripted, batches):
    seen = []
    callback = LambdaCallback(
        setup=lambda run, module, stage: seen.append(stage),
        on_train_start=lambda run, module: seen.append("start"),
        on_train_batch_end=lambda run, module, outputs, batch, batch_idx: seen.append(batch_idx),
        on_train_end=lambda run, module: seen.append(run.step),
        on_fit_end=None,
    )
    make_fit(callbacks=[callback]).run(scripted(), batches)
    assert seen == ["fit", "start", 0, 1, 2, 3, 4]


def test_events_without_a_function_cost_nothing(make_fit, scripted, batches):
    counts = {}

    def look(run, module):
        counts.update({name: len(hooks) for name, hooks in vars(run.hooks).items() if isinstance(hooks, tuple)})

    make_fit(callbacks=[LambdaCallback(on_fit_start=look)]).run(scripted(), batches)
    assert counts["on_fit_start"] == 1
    assert counts["on_train_batch_end"] == counts["on_before_backward"] == 0


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            {"on_train_epoch_ended": lambda run, module: None},
            "'on_train_epoch_ended' is not an event; did you mean 'on_train_epoch_end'",
        ),
        ({"state_dict": dict}, "'state_dict' is not an event; events: setup, teardown, on_fit_start"),
        ({"on_fit_end": 3}, r"LambdaCallback\(on_fit_end=3\): it must be a function"),
        ({"on_train_end": lambda run: None}, r"passes \(run, module\), and the function takes \(run\)"),
    ],
)
def test_what_is_not_an_event_or_does_not_fit_is_an_error(functions, message):
    with pytest.raises(TypeError, match=message):
        LambdaCallback(**functions)


def test_a_loader_index_is_optional():
    LambdaCallback(on_validation_batch_end=lambda run, module, outputs, batch, batch_idx: None)
    LambdaCallback(on_validation_batch_end=lambda run, module, outputs, batch, batch_idx, dataloader_idx=0: None)
