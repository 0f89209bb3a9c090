"""Losses without logits beside plain ones: values and gradients, formats, strategies, compiled, and errors before weights are wrong."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import ranks_of_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from engine import FSDP, DeepSpeed, Engine, Fit, Loss, MeshParallel, TrainModule, losses
from engine.losses import linear_cross_entropy, token_log_probs

ROWS, WIDTH, VOCABULARY = 37, 24, 101


def drawn(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[Tensor, list[Tensor], Tensor]:
    """Targets, every fifth of which does not count; hidden states, weight and bias; a gradient for each row."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    targets[::5] = -100
    shapes = [(ROWS, WIDTH), (VOCABULARY, WIDTH), *([(VOCABULARY,)] if bias else [])]
    tensors = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]
    return targets, tensors, torch.randn(ROWS, generator=generator, dtype=torch.float64)


def plain_loss(
    inputs: list[Tensor],
    targets: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    logits = F.linear(*inputs) * scale
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
    return loss + z_loss * (logits.logsumexp(-1).square() * (targets != -100)).sum()


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max())


CASES = list(itertools.product((0.0, 0.1), (0.0, 1e-3), (None, 3.0), (False, True), (False, True)))


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_values_and_gradients_are_those_of_plain_logits(scale: float) -> None:
    for label_smoothing, z_loss, softcap, bias, recompute in CASES:
        arguments = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap, "scale": scale}
        targets, inputs, _ = drawn(bias=bias)
        expected = plain_loss(inputs, targets, **arguments)  # type: ignore[arg-type]
        loss = linear_cross_entropy(
            inputs[0],
            inputs[1],
            targets,
            bias=inputs[2] if bias else None,
            chunk=8,
            recompute=recompute,
            **arguments,  # type: ignore[arg-type]
        )
        assert relative(loss.sum, expected) < 1e-12
        assert int(loss.count) == int((targets != -100).sum())
        for gradient, wanted in zip(
            torch.autograd.grad(loss.sum * 0.37, inputs), torch.autograd.grad(expected * 0.37, inputs), strict=True
        ):
            assert relative(gradient, wanted) < 1e-12, (arguments, bias, recompute)


def test_log_probs_are_those_of_plain_logits() -> None:
    for softcap, scale in itertools.product((None, 3.0), (1.0, 0.3)):
        targets, inputs, seeds = drawn()
        logits = F.linear(*inputs) * scale
        logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
        counted = targets != -100
        expected = logits.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0] * counted
        values = token_log_probs(inputs[0], inputs[1], targets, bias=inputs[2], softcap=softcap, scale=scale, chunk=8)
        assert relative(values, expected) < 1e-12
        assert (values[~counted] == 0).all()
        pairs = zip(
            torch.autograd.grad(values, inputs, seeds), torch.autograd.grad(expected, inputs, seeds), strict=True
        )
        assert all(relative(gradient, wanted) < 1e-12 for gradient, wanted in pairs)


def test_log_probs_have_the_shape_of_the_targets() -> None:
    head, hidden = nn.Linear(WIDTH, VOCABULARY), torch.randn(2, 3, WIDTH)
    targets = torch.randint(VOCABULARY, (2, 3))
    values = token_log_probs(hidden, head, targets)
    assert values.shape == (2, 3)
    torch.testing.assert_close(values, head(hidden).log_softmax(-1).gather(2, targets[..., None])[..., 0])
    with torch.no_grad():
        assert torch.equal(token_log_probs(hidden, head, targets), values)
    assert token_log_probs(hidden[0, 0], head, targets[0, 0]).shape == ()


@pytest.mark.parametrize("form", ["bf16", "fp16", "autocast"])
def test_in_half_precision_the_errors_are_those_of_plain_logits(form: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}[form]
    targets, exact, _ = drawn()
    wanted = torch.autograd.grad(plain_loss(exact, targets), exact)
    errors = []
    for compute in (
        lambda t: plain_loss(t, targets),
        lambda t: linear_cross_entropy(t[0], t[1], targets, bias=t[2], chunk=8).sum,
    ):
        tensors = [t.detach().to(dtype).requires_grad_() for t in exact]
        with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
            loss = compute(tensors)
        assert loss.dtype == torch.float32
        gradients = torch.autograd.grad(loss * 2.0**9, tensors)
        assert [g.dtype for g in gradients] == [dtype] * 3
        errors.append(
            [float((g.double() / 2**9 - w).norm() / w.norm()) for g, w in zip(gradients, wanted, strict=True)]
        )
    assert all(ours < 1.5 * plain for plain, ours in zip(*errors, strict=True)), errors


def test_small_gradients_survive_fp16() -> None:
    """Probabilities of 1e-8 round to 0 in fp16 unless the loss's scale comes before."""
    hidden, weight = (
        torch.zeros(4, 8, dtype=torch.float16),
        torch.zeros(1000, 8, dtype=torch.float16, requires_grad=True),
    )
    hidden[:, 0], targets = 1.0, torch.zeros(4, dtype=torch.long)
    weight.data[0, 0] = 11.0  # the others have exp(-11) / 1 = 1.7e-5
    loss = linear_cross_entropy(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(loss.sum * 1024.0, [weight])
    assert float(gradient[5, 0]) / 1024.0 == pytest.approx(4 * 1.6425e-5, rel=1e-2)


def test_only_wanted_gradients_are_computed() -> None:
    targets, (hidden, weight, bias), _ = drawn()
    for wanted in ([hidden], [weight], [bias], [weight, bias]):
        inputs = [t if any(t is w for w in wanted) else t.detach() for t in (hidden, weight, bias)]
        loss = linear_cross_entropy(inputs[0], inputs[1], targets, bias=inputs[2])
        gradients = torch.autograd.grad(loss.sum, wanted)
        pairs = zip(gradients, torch.autograd.grad(plain_loss([hidden, weight, bias], targets), wanted), strict=True)
        assert all(relative(gradient, expected) < 1e-12 for gradient, expected in pairs)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, bias=bias)
    assert not loss.sum.requires_grad
    assert relative(loss.sum, plain_loss([hidden, weight, bias], targets)) < 1e-12


@pytest.mark.parametrize("rows", [0, 5])
def test_without_a_target_that_counts_loss_and_gradients_are_zero(rows: int) -> None:
    head, hidden = nn.Linear(8, 20), torch.randn(rows, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, head, torch.full((rows,), -100), z_loss=0.1, label_smoothing=0.1)
    loss.sum.backward()
    assert float(loss.sum.detach()) == int(loss.count) == 0
    assert hidden.grad is not None
    for tensor in (hidden.grad, head.weight.grad, head.bias.grad):
        assert tensor is not None
        assert not tensor.any()


def test_a_class_can_be_the_target_that_does_not_count() -> None:
    targets, (hidden, weight, bias), _ = drawn()
    targets = targets.clamp(min=0)
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, ignore_index=0)
    assert (
        relative(loss.sum, F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum", ignore_index=0))
        < 1e-12
    )
    assert int(loss.count) == int((targets != 0).sum())


@pytest.mark.parametrize("form", ["4-D", "transposed", "expanded", "int32", "uint8", "one token"])
def test_hidden_states_and_targets_of_other_forms(form: str) -> None:
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(8, 20).double(), torch.randn(3, 4, 8).double(), torch.randint(20, (3, 4))
    hidden, targets = {
        "4-D": lambda: (hidden.view(3, 2, 2, 8), targets.view(3, 2, 2)),
        "transposed": lambda: (hidden.permute(1, 2, 0).transpose(1, 2), targets.t()),
        "expanded": lambda: (hidden[:1].expand(3, 4, 8), targets),
        "int32": lambda: (hidden, targets.int()),
        "uint8": lambda: (hidden, targets.to(torch.uint8)),
        "one token": lambda: (hidden[0, 0], targets[0, 0]),
    }[form]()
    leaf = hidden.detach().requires_grad_()
    loss = linear_cross_entropy(leaf, head, targets, chunk=5)
    plain = F.cross_entropy(head(leaf).reshape(-1, 20), targets.reshape(-1).long(), reduction="sum")
    assert relative(loss.sum, plain) < 1e-12
    wanted = [leaf, head.weight, head.bias]
    pairs = zip(torch.autograd.grad(loss.sum, wanted), torch.autograd.grad(plain, wanted), strict=True)
    assert all(relative(ours, theirs) < 1e-12 for ours, theirs in pairs)
    assert int(loss.count) == targets.numel()


@pytest.mark.parametrize("argument", ["weight", "reduction"])
def test_arguments_of_cross_entropy_that_are_not_here_are_named(argument: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{argument}'"):
        linear_cross_entropy(torch.randn(3, 8), nn.Linear(8, 20), torch.zeros(3).long(), **{argument: None})  # type: ignore[arg-type]


def test_a_weight_can_have_other_uses() -> None:
    """An embedding shares it, and it is the layer of two losses."""
    tokens = torch.randint(50, (3, 7), generator=torch.Generator().manual_seed(1))

    def gradient(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        torch.manual_seed(2)
        embedding = nn.Embedding(50, 8).double()
        hidden = embedding(tokens).tanh()
        total = loss(hidden[:, :-1], embedding.weight, tokens[:, 1:]) + 0.3 * loss(
            hidden[:, :-2], embedding.weight, tokens[:, 2:]
        )
        return torch.autograd.grad(total, [embedding.weight])[0]

    plain = gradient(lambda h, w, t: F.cross_entropy(F.linear(h, w).flatten(0, 1), t.flatten(), reduction="sum"))
    assert relative(gradient(lambda h, w, t: linear_cross_entropy(h, w, t).sum), plain) < 1e-12


def test_a_second_backward_pass_needs_recompute() -> None:
    targets, (hidden, weight, _), _ = drawn()
    loss = linear_cross_entropy(hidden, weight, targets).sum
    torch.autograd.grad(loss, [hidden], retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a second backward pass through linear_cross_entropy.*recompute=True"):
        torch.autograd.grad(loss, [hidden])
    loss = linear_cross_entropy(hidden, weight, targets, recompute=True).sum
    first, second = (torch.autograd.grad(loss, [hidden], retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_backward_pass_that_creates_a_graph_is_an_error(recompute: bool) -> None:
    targets, (hidden, weight, _), _ = drawn()
    loss = linear_cross_entropy(hidden, weight, targets, recompute=recompute).sum
    with pytest.raises(RuntimeError, match=r"create_graph=True.*has no second derivative: compute plain logits"):
        torch.autograd.grad(loss, [hidden], create_graph=True)


def test_recomputed_activations_and_old_checkpointing_change_nothing() -> None:
    targets, (hidden, weight, bias), _ = drawn()
    expected = torch.autograd.grad(plain_loss([hidden, weight, bias], targets), [hidden, weight])
    for reentrant in (True, False):
        loss = checkpoint(
            lambda h: linear_cross_entropy(h, weight, targets, bias=bias).sum, hidden, use_reentrant=reentrant
        )
        hidden.grad = weight.grad = None
        loss.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert relative(hidden.grad, expected[0]) < 1e-10
        assert relative(weight.grad, expected[1]) < 1e-10


class Compiled(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.recompute = nn.Linear(8, 8), nn.Linear(8, 50), recompute

    def forward(self, x: Tensor, targets: Tensor) -> Loss:
        return linear_cross_entropy(
            self.body(x).relu(), self.head, targets, chunk=16, z_loss=1e-2, softcap=5.0, recompute=self.recompute
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo does that, not we
@pytest.mark.parametrize("recompute", [False, True])
def test_it_compiles_without_a_break(recompute: bool) -> None:
    module, x, targets = Compiled(recompute), torch.randn(4, 10, 8), torch.randint(50, (4, 10))
    targets[0, 3] = -100
    gradients = []
    compiled = (torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager") for dynamic in (None, True))
    for function in (module, *compiled):
        module.zero_grad()
        loss = function(x, targets)
        (loss.sum / loss.count).backward()
        gradients.append([p.grad for p in module.parameters()])
    torch.testing.assert_close(gradients[1:], gradients[:1] * 2)


class Adapted(nn.Linear):
    """A linear layer with an adapter, as peft and torchtune have them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "adapter": ({"head": Adapted(8, 20)}, "head is a Adapted, which computes something else than nn.Linear"),
    "floats": ({"targets": torch.zeros(3, dtype=torch.bfloat16)}, r"targets must be a tensor of classes \(integers\), got torch.bfloat16"),
    "booleans": ({"targets": torch.zeros(3, dtype=torch.bool)}, "targets must be a tensor of classes"),
    "integers": ({"hidden": torch.ones(3, 8, dtype=torch.long)}, r"hidden must be a tensor of floats \[\.\.\., width\], got torch.int64 \[3, 8\]"),
    "probabilities": ({"targets": torch.rand(3, 20)}, "targets must be a tensor of classes.*for probabilities of classes compute plain logits"),
    "rows": ({"targets": torch.zeros(4, dtype=torch.long)}, r"targets have shape \[4\], but hidden \[3, 8\] has rows \[3\]"),
    "width": ({"hidden": torch.randn(3, 7)}, r"hidden has shape \[3, 7\], and the weight takes \[\.\.\., 8\]"),
    "format": ({"hidden": torch.randn(3, 8, dtype=torch.bfloat16)}, "hidden is torch.bfloat16, and the weight torch.float32: call it"),
    "class": ({"targets": torch.tensor([3, 20, -100])}, "1 of 3 targets are not classes of a vocabulary of 20, the first is 20: classes are 0 to 19"),
    "negative": ({"targets": torch.tensor([3, -1, -100])}, "the first is -1"),
    "head": ({"head": nn.Sequential(nn.Linear(8, 20))}, "head is a Sequential, which computes something else than nn.Linear"),
    "lazy": ({"head": nn.Bilinear(8, 8, 20)}, "head is a Bilinear"),
    "two biases": ({"bias": torch.zeros(20)}, "Linear has its own bias"),
    "bias": ({"head": torch.zeros(20, 8), "bias": torch.zeros(19)}, r"the bias has shape \[19\], and the weight \[20, 8\]"),
    "vector": ({"head": torch.zeros(8)}, r"the weight must be \[vocabulary, width\] of floats, got torch.float32 \[8\]"),
    "device": ({"head": torch.zeros(20, 8, device="meta")}, "several devices: cpu, meta"),
    "smoothing": ({"label_smoothing": 1.5}, r"label_smoothing=1.5\) must be a number of at least 0 and at most 1"),
    "z": ({"z_loss": -1.0}, r"z_loss=-1.0\) must be a number of at least 0"),
    "cap": ({"softcap": 0.0}, r"softcap=0.0\) must be a number above 0, or None"),
    "scale": ({"scale": float("nan")}, r"scale=nan\) must be a finite number"),
    "chunk": ({"chunk": 0}, r"chunk=0\) must be a number of rows, or 'auto'"),
    "recompute": ({"recompute": 1}, r"recompute=1\) must be True, False or 'auto'"),
    "ignored": ({"ignore_index": 1.0}, r"ignore_index=1.0\) must be an int"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_an_error(name: str) -> None:
    changes, text = WRONG[name]
    arguments = {
        "hidden": torch.randn(3, 8),
        "head": nn.Linear(8, 20),
        "targets": torch.zeros(3, dtype=torch.long),
        **changes,
    }
    with pytest.raises((TypeError, ValueError), match=f"linear_cross_entropy.*{text}"):
        linear_cross_entropy(**arguments)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13")
def test_torchs_backend_gives_the_same_loss() -> None:
    targets, inputs, _ = drawn(torch.float32)
    losses = [
        linear_cross_entropy(inputs[0], inputs[1], targets, bias=inputs[2], backend=backend, chunk=8)
        for backend in (None, "torch")
    ]
    assert relative(losses[1].sum, losses[0].sum) < 1e-6
    assert torch.equal(torch.as_tensor(losses[0].count), torch.as_tensor(losses[1].count))
    gradients = [torch.autograd.grad(loss.sum, inputs) for loss in losses]
    assert all(relative(theirs, ours) < 1e-5 for ours, theirs in zip(*gradients, strict=True))
    half = [t.detach().bfloat16() for t in inputs]
    with pytest.raises(ValueError, match=r"backend='torch'\) in torch.bfloat16 adds losses up in that format"):
        linear_cross_entropy(half[0], half[1], targets, backend="torch")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"backend": "torch", "z_loss": 1e-4},
            r"backend='torch'\) does not have z_loss=0.0001: leave out one of the two",
        ),
        ({"backend": "torch", "label_smoothing": 0.1}, "does not have label_smoothing=0.1"),
        ({"backend": "cut_cross_entropy", "label_smoothing": 0.1}, "does not have label_smoothing=0.1"),
        ({"backend": "liger", "scale": 2.0}, "does not have scale=2.0"),
        ({"backend": "liger"}, 'not installed: pip install "liger-kernel"'),
        ({"backend": "cut_cross_entropy", "softcap": 3.0}, 'not installed: pip install "cut-cross-entropy"'),
        ({"backend": "lige"}, r"backend='lige'\) is unknown; did you mean 'liger'"),
    ],
)
def test_a_backend_lacks_an_argument_or_is_not_installed(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, ImportError), match=text):
        linear_cross_entropy(torch.randn(3, 8), nn.Linear(8, 20), torch.zeros(3, dtype=torch.long), **arguments)


def test_a_weight_that_a_hook_computes_is_an_error_and_a_parametrization_is_not() -> None:
    targets, hidden = torch.tensor([1, 2, 3]), torch.randn(3, 8)
    hooked = nn.Linear(8, 20)
    l1_unstructured(hooked, "weight", 0.5)
    with pytest.raises(TypeError, match="a hook computes the weight"):
        linear_cross_entropy(hidden, hooked, targets)
    head = weight_norm(nn.Linear(8, 20))
    loss = linear_cross_entropy(hidden, head, targets)
    torch.testing.assert_close(loss.sum, F.cross_entropy(head(hidden), targets, reduction="sum"))
    gradients = torch.autograd.grad(loss.sum, list(head.parameters()))
    torch.testing.assert_close(
        gradients, torch.autograd.grad(F.cross_entropy(head(hidden), targets, reduction="sum"), list(head.parameters()))
    )


# -- trainings ------------------------------------------------------------------------------------------------------------------------

TOKENS = torch.randint(97, (24, 9), generator=torch.Generator().manual_seed(1))
TOKENS_OF_FIRST_STEP = TOKENS[:8]  # a global batch, in the order of a loader that does not shuffle


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Output(nn.Module):
    """The last part: the norm is its forward pass, and the loss reads the weight of its head."""

    def __init__(self, tied: Tensor | None) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 97, bias=tied is None)
        if tied is not None:
            self.head.weight = tied  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class Net(TrainModule):
    """``plain``: with logits."""

    def __init__(self, tied: bool = False, plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.embedding = plain, nn.Embedding(97, 16)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.output = Output(self.embedding.weight if tied else None)

    def parallelize(self, mesh: Any) -> dict[str, Any]:
        tied = self.output.head.weight is self.embedding.weight
        plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "output.head": "colwise_gather_output"}
        return {**plan, "embedding": "embedding_rowwise"} if tied else plan

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.embedding, *self.layers, self.output]

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.output(hidden)
        return out

    def training_step(self, batch: Tensor, batch_idx: int) -> Loss:
        tokens, targets = batch[:, :-1], batch[:, 1:].clone()
        targets[:, 0] = torch.where(
            tokens[:, 0] % 3 == 0, -100, targets[:, 0]
        )  # ranks and micro-batches have other counts
        loss = self.loss_of(self(tokens), targets)
        self.log("loss", loss)
        return loss

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Loss:
        if not self.plain:
            return linear_cross_entropy(hidden, self.output.head, targets, z_loss=1e-3, label_smoothing=0.1, chunk=5)
        head = self.output.head
        logits = head(hidden).float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=0.1)
        counted = targets != -100
        return Loss(loss + 1e-3 * (logits.logsumexp(-1).square() * counted).sum(), counted.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def trained(
    strategy: Any, tied: bool, precision: str = "32-true", plain: bool = False, **settings: Any
) -> dict[str, list[float]]:
    """The weights after three steps of two micro-batches on each rank."""
    module = Net(tied, plain)
    with tempfile.TemporaryDirectory() as root:
        fit = Fit(
            strategy=strategy, accelerator="cpu", max_epochs=1, seed=0, global_batch_size=8, precision=precision, root_dir=root,
            gradient_clip_val=1.0, **settings,
        )  # fmt: skip
        fit.run(module, DataLoader(TOKENS, batch_size=2))
        state = fit.state_dict(module)
    return {name: value.float().flatten().tolist() for name, value in state.items()}


def distance(a: dict[str, list[float]], b: dict[str, list[float]]) -> float:
    return max(relative(torch.tensor(a[name]), torch.tensor(b[name])) for name in b)


class FirstGradient(Net):
    """Has the gradient of its first step, as this rank has it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def gradient(strategy: Any, tied: bool, precision: str = "32-true", plain: bool = False) -> Tensor:
    """The gradient of the first step, of all parameters in one vector: by how much plain SGD changes them."""
    module = FirstGradient(tied, plain)
    before = {name: value.double() for name, value in FirstGradient(tied).state_dict().items()}
    with tempfile.TemporaryDirectory() as root:
        fit = Fit(
            strategy=strategy, accelerator="cpu", max_steps=1, seed=0, global_batch_size=8, precision=precision, root_dir=root
        )  # fmt: skip
        fit.run(module, DataLoader(TOKENS, batch_size=2))
        after = fit.state_dict(module)
    # Rank 0 alone has whole ones.
    return torch.cat([(before[name] - after[name].double()).flatten() for name in sorted(after)] or [torch.zeros(1)])


def errors(strategies: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """By format and strategy the errors of the gradients without logits, and of those with them."""
    results = {}
    for tied in (False, True):
        exact = gradient_in_fp64(tied)
        for precision in FORMATS:
            for name, make in strategies.items():
                if (name, precision) == ("pp", "16-mixed"):  # refuses a Loss, with or without logits
                    continue
                pair = [gradient(make(), tied, precision, plain) for plain in (False, True)]
                if pair[0].numel() == exact.numel():
                    results[f"{precision}, {name}, tied={tied}"] = [
                        float((value - exact).norm() / exact.norm()) for value in pair
                    ]
    return results


def gradient_in_fp64(tied: bool) -> Tensor:
    """The same gradient from torch alone."""
    module = FirstGradient(tied, plain=True).double()
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    loss = module.training_step(TOKENS_OF_FIRST_STEP, 0)
    (loss.sum / loss.count).backward()
    grads = {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}
    return torch.cat([g.flatten() for name in sorted(grads) if (g := grads[name]) is not None])


STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "tp": lambda: MeshParallel(tp=2, dp_shard=1),
    "pp": lambda: MeshParallel(pp=2, dp_shard=1),
}


def rank_trained() -> Any:
    return {
        f"{name}, tied={tied}": trained(strategy(), tied)
        for name, strategy in STRATEGIES.items()
        for tied in (False, True)
    }


class Ignored(Net):
    """On rank 1 no target counts in the first step."""

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Loss:
        if self.global_rank == 1 and self.global_step == 0:
            targets = torch.full_like(targets, -100)
        return super().loss_of(hidden, targets)


def rank_ignored() -> Any:
    """The weights after a step in which the targets of one rank do not count, and a second one, without and with logits."""
    weights = {}
    for strategy in ("ddp", "fsdp"):
        for plain in (False, True):
            module = Ignored(plain=plain)
            with tempfile.TemporaryDirectory() as root:
                fit = Fit(strategy=strategy, accelerator="cpu", max_steps=2, seed=0, root_dir=root)
                fit.run(module, DataLoader(TOKENS, batch_size=2))
                weights[f"{strategy}, {plain}"] = {k: v.flatten().tolist() for k, v in fit.state_dict(module).items()}
    return weights


def rank_own_loop() -> Any:
    """The gradient of the whole batch in a loop of one's own, where the loss is computed outside of the model's forward pass."""
    gradients = {}
    for strategy in ("ddp", "fsdp"):
        engine = Engine(strategy=strategy, accelerator="cpu", accumulate_grad_batches=2)
        module = Net()
        model, optimizer = engine.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        own = TOKENS[engine.process_index * 12 :][:12]
        for part in own.split(6):
            with engine.accumulate(model):
                hidden = model(part[:, :-1])
                engine.backward(linear_cross_entropy(hidden, module.output.head, part[:, 1:], chunk=7))
        engine.unscale_gradients(optimizer)
        grads = {name: p.grad for name, p in module.named_parameters()}
        gradients[strategy] = {
            name: (g.full_tensor() if isinstance(g, DTensor) else g).flatten().tolist()
            for name, g in grads.items()
            if g is not None
        }
    return gradients


def rank_refused() -> Any:
    """Errors of weights that are sharded in a way that the loss cannot use."""
    errors = {}
    for name, strategy in {
        "block": FSDP(blocks=("output.head", Block)),
        "rowwise": MeshParallel(tp=2, dp_shard=1, plan={"output.head": "rowwise"}),
    }.items():
        try:
            trained(strategy, False)
        except ValueError as error:
            errors[name] = str(error)
    return errors


def rank_log_probs() -> Any:
    """Log-probabilities and their gradients with a weight that is sharded by the vocabulary, beside whole ones."""
    engine = Engine(strategy=MeshParallel(tp=2, dp_shard=1), accelerator="cpu")
    module = Net()
    whole = [p.detach().clone().requires_grad_() for p in (module.output.head.weight, module.output.head.bias)]
    engine.prepare(module)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(4)).requires_grad_()
    targets, seeds, head = (
        torch.tensor([0, 96, 50, -100, 48]),
        torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0]),
        module.output.head,
    )
    expected = F.linear(hidden, *whole).log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0] * (
        targets != -100
    )
    values = token_log_probs(hidden, head, targets, chunk=2)
    wanted = torch.autograd.grad(expected, [hidden, *whole], seeds)
    ours = torch.autograd.grad(values, [hidden, head.weight, head.bias], seeds)
    return [
        relative(values, expected),
        *(relative(a.full_tensor() if isinstance(a, DTensor) else a, b) for a, b in zip(ours, wanted, strict=True)),
        len(head.weight.to_local()) if isinstance(head.weight, DTensor) else 0,
    ]


@pytest.fixture(scope="module")
def ranks() -> Any:
    return ranks_of_file(__file__, 2)


@pytest.fixture(scope="module")
def plain_weights() -> dict[bool, dict[str, list[float]]]:
    return {tied: trained("single", tied, plain=True) for tied in (False, True)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["single", *STRATEGIES])
def test_every_strategy_trains_as_one_process_with_logits(
    ranks: Any, plain_weights: Any, name: str, tied: bool
) -> None:
    weights = trained("single", tied) if name == "single" else ranks["trained"][0][f"{name}, tied={tied}"]
    assert distance(weights, plain_weights[tied]) < 2e-6


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_may_have_no_target_that_counts(ranks: Any, strategy: str) -> None:
    ours, plain = (ranks["ignored"][0][f"{strategy}, {is_plain}"] for is_plain in (False, True))
    assert distance(ours, plain) < 2e-6
    assert all(torch.tensor(values).isfinite().all() for values in ours.values())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loop_of_ones_own_has_the_gradients_of_one_big_batch(ranks: Any, strategy: str) -> None:
    module = Net()
    hidden = module(TOKENS[:, :-1])
    head = module.output.head
    F.cross_entropy(head(hidden).flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    expected = {name: p.grad.flatten().tolist() for name, p in module.named_parameters() if p.grad is not None}
    for gradients in ranks["own_loop"]:
        assert distance(gradients[strategy], expected) < 2e-6


def test_other_shardings_are_errors(ranks: Any) -> None:
    for errors in ranks["refused"]:
        assert "sharded over the axis 'dp_shard' of the mesh, whose ranks see different samples" in errors["block"]
        assert (
            "sharded by S(1) over the axis 'tp'; it can be sharded by the vocabulary ('colwise')" in errors["rowwise"]
        )


def test_log_probs_of_a_sharded_vocabulary(ranks: Any) -> None:
    for *distances, classes in ranks["log_probs"]:
        assert max(distances) < 1e-6
        assert classes in (49, 48)


FORMATS = {"32-true": 1e-6, "bf16-mixed": 0.0, "16-mixed": 0.0}
"""By format, the error that a gradient may have besides 1.3 times that of the one with logits."""
FOUR: dict[str, Callable[[], Any]] = {
    "tp x fsdp": lambda: MeshParallel(tp=2, dp_shard=2),
    "hybrid": lambda: FSDP(dp_replicate=2),
}
ZERO: dict[str, Callable[[], Any]] = {
    **{f"stage {stage}": lambda stage=stage: DeepSpeed(stage=stage) for stage in (1, 2)},
    "stage 3": lambda: DeepSpeed(stage=3, param_persistence_threshold=0),
}


def slow_errors() -> Any:
    return errors(STRATEGIES)


def check_errors(results: dict[str, list[float]], count: int) -> None:
    assert len(results) == count
    for name, (ours, plain) in results.items():
        assert ours < 1.3 * plain + FORMATS[name.partition(",")[0]], (name, ours, plain)


@pytest.mark.slow
def test_gradients_have_the_errors_of_plain_ones_in_every_format_under_every_strategy() -> None:
    check_errors(errors({"single": lambda: "single"}), 2 * len(FORMATS))
    check_errors(ranks_of_file(__file__, 2, "slow_")["errors"][0], 2 * (len(FORMATS) * len(STRATEGIES) - 1))


def zero_trained() -> Any:
    return {f"{name}, tied={tied}": trained(make(), tied) for name, make in ZERO.items() for tied in (False, True)}


@pytest.mark.slow
def test_deepspeed_trains_as_one_process_with_logits(plain_weights: Any) -> None:
    pytest.importorskip("deepspeed")
    for name, weights in ranks_of_file(__file__, 2, "zero_")["trained"][0].items():
        assert distance(weights, plain_weights["True" in name]) < 2e-6, name


def four_errors() -> Any:
    return errors(FOUR)


def four_trained() -> Any:
    return {f"{name}, tied={tied}": trained(make(), tied) for name, make in FOUR.items() for tied in (False, True)}


@pytest.mark.slow
def test_four_ranks_train_as_one_process_with_logits(plain_weights: Any) -> None:
    ranks = ranks_of_file(__file__, 4, "four_")
    for name, weights in ranks["trained"][0].items():
        assert distance(weights, plain_weights["True" in name]) < 2e-6, name
    check_errors(ranks["errors"][0], 2 * len(FORMATS) * len(FOUR))


def test_no_module_has_a_functions_name() -> None:
    """An import of the module would put it in the function's place."""
    folder = Path(losses.__file__).parent
    assert not {path.stem for path in folder.glob("*.py")} & set(losses.__all__)
