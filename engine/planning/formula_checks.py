"""Published formulas beside the numbers of a plan that they should agree with."""

from __future__ import annotations

from collections.abc import Sequence

from engine.planning import paper_formulas
from engine.planning.job import Job
from engine.planning.paper_formulas import Check
from engine.planning.rank_trace import RankTrace
from engine.planning.roofline import model_flops


def checks(job: Job, traces: Sequence[RankTrace], worst: RankTrace, samples_per_step: int) -> tuple[Check, ...]:
    """Those that are known for this job; none if its model is not known to be a dense transformer and its strategy is not ZeRO.

    Args:
        job: what is planned.
        traces: of the ranks that differ from each other.
        worst: the one of them that needs the most memory.
        samples_per_step: over all ranks.
    """
    found = [*_of_zero(job, worst)]
    shape = job.shape
    if shape is None or not shape.sequence:
        return tuple(found)
    tokens = samples_per_step * shape.sequence
    standing = sum(trace.stands_for for trace in traces)
    model = sum(model_flops(trace.operations) * trace.stands_for for trace in traces) * job.world_size / standing
    found += (
        Check("parameters", job.parameters, paper_formulas.parameters(shape), "12 l h^2 + V h, Narayanan et al. 2021"),
        Check(
            "FLOPs of a step",
            model,
            paper_formulas.flops(shape, job.parameters, tokens),
            "6 N D + 12 l h s D, Kaplan et al. 2020, Chowdhery et al. 2022",
        ),
    )
    if job.schedule is None and job.checkpointing in (None, "full"):
        samples = worst.samples // max(1, worst.micro_batches)
        # Without it activations between the parallel parts are reduced, not scattered.
        sequence_parallel = any(one.axis == "tp" and one.kind == "reduce_scatter" for one in worst.collectives)
        kept = paper_formulas.activations(
            shape,
            samples,
            bytes_each={"64-true": 8, "32-true": 4}.get(job.precision, 2),
            tp=job.axes.get("tp", 1),
            sequence_parallel=sequence_parallel,
            full=job.checkpointing == "full",
        )
        formula = "2 s b h l" if job.checkpointing else f"s b h l {'34/t' if sequence_parallel else '(10 + 24/t)'}"
        traced = max((moment.memory.activations for moment in worst.timeline), default=worst.peak.memory.activations)
        found.append(Check("activations", traced, kept, f"{formula}, Korthikanti et al. 2022"))
    return tuple(found)


def _of_zero(job: Job, worst: RankTrace) -> tuple[Check, ...]:
    """What a rank keeps between steps under ZeRO. What is offloaded, the trace leaves out."""
    if job.zero is None or not job.trainable:
        return ()
    (stage, size), start = job.zero, worst.timeline[0].memory
    if not start.optimizer_state or not start.parameters:
        return ()
    # Gradients are there in the backward pass and the step only; the paper counts them at all times.
    kept = paper_formulas.model_state(job.trainable, job.data_ranks, stage, parameter_bytes=size, gradient_bytes=0)
    frozen = (job.parameters - job.trainable) * size / (job.data_ranks if stage == 3 else 1)
    traced = start.parameters + start.optimizer_state
    return (
        Check("parameters, master copies and optimizer state", traced, kept + frozen, "ZeRO, Rajbhandari et al. 2020"),
    )
