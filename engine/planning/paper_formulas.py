"""A dense transformer's parameters, FLOPs and memory by published formulas, to cross-check the traced numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.planning.job import Job, Shape
from engine.planning.rank_trace import RankTrace
from engine.planning.step_time import model_flops

DIFFERS = 0.2
"""The relative difference beyond which a formula is shown beside the traced number."""


@dataclass(frozen=True, slots=True)
class Check:
    """A traced number beside the result of a published formula."""

    what: str
    traced: float
    formula: float
    source: str

    @property
    def differs(self) -> bool:
        """Check whether the numbers differ by more than :data:`DIFFERS`."""
        return abs(self.traced - self.formula) > DIFFERS * max(self.formula, 1e-12)


def parameters(shape: Shape) -> int:
    """The number of parameters by a formula that leaves out biases and norms: 12 l h^2 + V h for GPT (Narayanan et al. 2021, section 5)."""
    h = shape.hidden
    keys = (shape.key_heads or shape.heads) / shape.heads
    attention = 2 * h * h + 2 * h * h * keys
    feed_forward = (3 if shape.gated else 2) * h * shape.wide
    embeddings = shape.vocabulary * h * (1 if shape.tied else 2) + shape.positions * h
    return int(shape.layers * (attention + feed_forward) + embeddings)


def flops(shape: Shape, count: int, tokens: int) -> float:
    """FLOPs of forward and backward passes: 6 N D (Kaplan et al. 2020) and 12 l h s for each token (PaLM, Chowdhery et al. 2022, appendix B).

    Args:
        shape: shape of the model.
        count: number of parameters, N; those of an input embedding that is not also the output layer multiply nothing and are left out here.
        tokens: number of tokens, D.
    """
    without_product = (0 if shape.tied else shape.vocabulary * shape.hidden) + shape.positions * shape.hidden
    return 6.0 * (count - without_product) * tokens + 12.0 * shape.layers * shape.hidden * shape.sequence * tokens


def activations(
    shape: Shape, samples: int, *, bytes_each: int = 2, tp: int = 1, sequence_parallel: bool = False, full: bool = False
) -> float:
    """Bytes of activations that the layers keep for the backward pass, without attention scores (Korthikanti et al. 2022, table 2, selective
    recomputation).

    Args:
        shape: shape of the model.
        samples: samples of a micro-batch.
        bytes_each: bytes of an activation; the paper's numbers are for 2.
        tp: ranks of tensor parallelism.
        sequence_parallel: between the tensor parallel regions activations are split as well.
        full: whether every layer is computed again in the backward pass, and keeps its input only.
    """
    elements = shape.sequence * samples * shape.hidden * shape.layers
    if full:
        return elements * bytes_each
    factor = 34 / tp if sequence_parallel else 10 + 24 / tp
    return elements * factor * bytes_each / 2


def model_state(
    count: int, shards: int, stage: int, *, parameter_bytes: int = 2, gradient_bytes: int = 2, optimizer_bytes: int = 12
) -> float:
    """Bytes of parameters, gradients and optimizer state on a rank: ZeRO (Rajbhandari et al. 2020, figure 1), mixed precision with Adam.

    Args:
        count: number of parameters.
        shards: ranks that share the parameters.
        stage: 0 (nothing is shared), 1 (optimizer state), 2 (and gradients), 3 (and parameters).
        parameter_bytes, gradient_bytes: for each parameter.
        optimizer_bytes: for each parameter: 12 with Adam and a float32 copy.
    """
    parts = (
        parameter_bytes / (shards if stage >= 3 else 1),
        gradient_bytes / (shards if stage >= 2 else 1),
        optimizer_bytes / (shards if stage >= 1 else 1),
    )
    return count * sum(parts)


def checks(job: Job, traces: Sequence[RankTrace], worst: RankTrace, samples_per_step: int) -> tuple[Check, ...]:
    """Compare the traced numbers with the formulas that apply; none if the model is not known to be a dense transformer and the strategy is not ZeRO.

    Args:
        job: the planned job.
        traces: traces of the ranks that differ from each other.
        worst: trace of the rank that needs the most memory.
        samples_per_step: samples over all ranks.
    """
    results = [*_zero_check(job, worst)]
    shape = job.shape
    if shape is None or not shape.sequence:
        return tuple(results)
    tokens = samples_per_step * shape.sequence
    rank_count = sum(trace.stands_for for trace in traces)
    model = sum(model_flops(trace.operations) * trace.stands_for for trace in traces) * job.world_size / rank_count
    results += (
        Check("parameters", job.parameters, parameters(shape), "12 l h^2 + V h, Narayanan et al. 2021"),
        Check(
            "FLOPs of a step",
            model,
            flops(shape, job.parameters, tokens),
            "6 N D + 12 l h s D, Kaplan et al. 2020, Chowdhery et al. 2022",
        ),
    )
    if job.schedule is None and job.checkpointing in (None, "full"):
        samples = worst.samples // max(1, worst.micro_batches)
        # Without it activations between the parallel parts are reduced, not scattered.
        sequence_parallel = any(
            collective.axis == "tp" and collective.kind == "reduce_scatter" for collective in worst.collectives
        )
        computed = activations(
            shape,
            samples,
            bytes_each={"64-true": 8, "32-true": 4}.get(job.precision, 2),
            tp=job.axes.get("tp", 1),
            sequence_parallel=sequence_parallel,
            full=job.checkpointing == "full",
        )
        formula = "2 s b h l" if job.checkpointing else f"s b h l {'34/t' if sequence_parallel else '(10 + 24/t)'}"
        traced = max((moment.memory.activations for moment in worst.timeline), default=worst.peak.memory.activations)
        results.append(Check("activations", traced, computed, f"{formula}, Korthikanti et al. 2022"))
    return tuple(results)


def _zero_check(job: Job, worst: RankTrace) -> tuple[Check, ...]:
    """Compare what a rank keeps between steps with the formula of ZeRO; the trace leaves out what is offloaded."""
    if job.zero is None or not job.trainable:
        return ()
    (stage, size), start = job.zero, worst.timeline[0].memory
    if not start.optimizer_state or not start.parameters:
        return ()
    # Gradients are there in the backward pass and the step only; the paper counts them at all times.
    computed = model_state(job.trainable, job.data_ranks, stage, parameter_bytes=size, gradient_bytes=0)
    frozen = (job.parameters - job.trainable) * size / (job.data_ranks if stage == 3 else 1)
    traced = start.parameters + start.optimizer_state
    return (
        Check(
            "parameters, master copies and optimizer state", traced, computed + frozen, "ZeRO, Rajbhandari et al. 2020"
        ),
    )
