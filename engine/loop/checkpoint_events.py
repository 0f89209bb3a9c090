"""The events of checkpoints that are complete, or gone: all ranks call them after the same step."""

from __future__ import annotations

from engine.distributed.collectives import gather_json
from engine.loop.run import Run


def announce(run: Run) -> None:
    """Call the events of what the main process has noticed; all ranks call this together."""
    run.control.agreement.news = False
    mine = [run.checkpoint_news.popleft() for _ in range(len(run.checkpoint_news))]
    for event, name in gather_json(run.engine.group, mine)[0]:
        path = run.checkpoint_path(name)
        if event == "saved":
            score = run.checkpoint_scores.pop(name, None)
            for hook in run.hooks.on_checkpoint_saved:
                hook(run, run.module, path, score)
        else:
            for hook in run.hooks.on_checkpoint_removed:
                hook(run, run.module, path)


def finish(run: Run) -> None:
    """Wait for the checkpoint in progress if anybody wants its event; all ranks call this together."""
    if run.hooks.on_checkpoint_saved or run.hooks.on_checkpoint_removed:
        run.wait_for_checkpoint()
        announce(run)
