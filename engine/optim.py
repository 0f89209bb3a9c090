"""Optimizers that need whole tensors, such as Muon: which ones they are, and which parameters of a model they are for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.optim import Optimizer

from engine.step.optimizers import Modes, needs_closure
from engine.transforms.blocks import blocks_of, matching, user_module
from engine.utils.log import logger

__all__ = ["Split", "split", "whole"]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class Treatment(NamedTuple):
    """How an optimizer that needs whole tensors is treated where they are sharded."""

    is_matrixwise: bool = True
    """Whether its step computes products of matrices, rather than with each element: its cost grows so."""
    divides_work: bool = False
    """Whether tensors that all ranks have are divided among them, too."""
    fills_gradients: bool = False
    """Whether the step makes gradients of zeros for parameters without one; then it must not see parameters of other ranks."""


_MATRICES, _ELEMENTS = Treatment(), Treatment(is_matrixwise=False)
_OF_TORCH = {"Muon": _MATRICES, "Adafactor": _ELEMENTS, "Rprop": _ELEMENTS}
_OF_TORCHAO = ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")
_OF_PYTORCH_OPTIMIZER = (
    dict.fromkeys(("AdaGO", "Alice", "APOLLO", "DASH", "Fira", "GaLore", "Kron", "MuonClip", "NorMuon", "SpectralSphere"), _MATRICES)
    | dict.fromkeys(("A2Grad", "ADOPT", "AdaNorm", "AdaSmooth", "AdaTAM", "AdamP", "Adan", "Aida", "Amos", "ApolloDQN"), _ELEMENTS)
    | dict.fromkeys(("DiffGrad", "EmoFact", "FAdam", "FTRL", "FlashAdamW", "Fromage", "MADGRAD", "MARS", "Nero", "RACS"), _ELEMENTS)
    | dict.fromkeys(("ROSE", "SGDP", "SGDSaI", "SPAM", "SRMM", "SWATS", "SaRA", "StableAdamW", "StableSPAM", "TAM"), _ELEMENTS)
)  # fmt: skip
"""Classes of the package ``pytorch_optimizer`` that use a norm of each tensor, have states of other shapes, or do what torch cannot distribute."""
_BY_NAME = (
    dict.fromkeys(("SOAP", "Shampoo", "ScalableShampoo", "Muon", "AdaMuon", "Conda", "SCION", "SCIONLight"), _MATRICES)
    | dict.fromkeys(("SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam"), Treatment(fills_gradients=True))
    | dict.fromkeys(("CAME", "Adafactor", "AdaFactor", "Adalite", "SM3", "NovoGrad"), _ELEMENTS)
    | dict.fromkeys(("Adam_mini", "AdamMini", "LAMB", "Lamb", "LARS", "Lars"), _ELEMENTS)
)
"""Classes of other packages and of the user, by name."""
_OWN_WORK = ("dion", "distributed_shampoo", "heavyball", "torchtitan")
"""Packages whose optimizers know sharded tensors, or keep views of parameters: they are left alone."""
_TRIED = ("torch", "torchao", "bitsandbytes")
"""Packages whose classes are all known."""
_GLOBAL = (
    *("Prodigy", "ProdigyPlusScheduleFree", "AdaGC", "DoG", "DoWG", "DAdaptation", "Mechanic"),
    *("DAdaptSGD", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptAdaGrad"),
)
"""Classes with a value over all parameters, which a rank with some of them cannot compute."""
_COLLECTIVES = frozenset(
    (
        *(
            "all_gather",
            "all_gather_into_tensor",
            "all_gather_object",
            "all_reduce",
            "reduce",
            "broadcast",
            "all_to_all",
        ),
        *("all_to_all_single", "reduce_scatter", "reduce_scatter_tensor", "batch_isend_irecv", "isend", "irecv"),
    )
)
_MARK = "whole_tensors"


def whole(optimizer: AnyOptimizer, divide_work: bool = False) -> AnyOptimizer:
    """Lend whole tensors to an optimizer in its steps, wherever parameters are sharded.

    Before a step each whole gradient and value goes to one rank, where the unchanged class steps them; then the new values come back. Use it for
    optimizers that do more than treat each element by itself (they factorize, orthogonalize, normalize or quantize a matrix) and are not known:
    ``torch.optim.Muon`` and ``Adafactor``, SOAP, Shampoo, CAME, Adam-mini, 8-bit optimizers of torchao and bitsandbytes and some others are treated
    so without this call. An optimizer of an unknown class is tried on small matrices where parameters are sharded, and a warning says if this call
    seems to be missing, or wrong.

    Args:
        optimizer: an optimizer that is not prepared yet.
        divide_work: divide tensors that all ranks have, as under DDP, too: each rank steps its share of them and has the state of these only.
            That costs one collective a step, and saves time where a step is expensive.

    Returns:
        The same optimizer.

    Raises:
        TypeError: it is not an optimizer of torch, or is prepared.
        ValueError: its step cannot be taken tensor by tensor; the message says why.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"engine.optim.whole() got {type(optimizer).__name__}: give a torch.optim.Optimizer, before it is prepared"
        )
    chosen = known_treatment(optimizer) or _MATRICES
    if problem := _obstacle(optimizer):
        raise ValueError(f"engine.optim.whole({type(optimizer).__name__}): {problem}")
    vars(optimizer)[_MARK] = chosen._replace(divides_work=divide_work)
    return optimizer


def treatment(optimizer: Optimizer) -> Treatment | None:
    """How an optimizer's step gets whole tensors; ``None``: it needs none.

    Raises:
        ValueError: it is known to need them, and cannot get them; the message says why.
    """
    marked: Treatment | None = vars(optimizer).get(_MARK)
    if marked is not None:
        return marked
    of_class = known_treatment(optimizer)
    if (of_class is not None or _is_global(optimizer)) and (problem := _obstacle(optimizer)):
        raise ValueError(f"{type(optimizer).__name__} needs whole tensors, and parameters are sharded: {problem}")
    return of_class


def was_tried(optimizer: Optimizer) -> bool:
    """Return whether the class is known by its package too, and not only by a name that other packages may use differently."""
    return _is_own_work(optimizer) or type(optimizer).__module__.partition(".")[0] in _TRIED


def was_said(optimizer: Optimizer) -> bool:
    """Whether the user has called :func:`whole` for the optimizer."""
    return _MARK in vars(optimizer)


def is_known(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known, or was said, to need whole tensors."""
    return was_said(optimizer) or known_treatment(optimizer) is not None


def divides_work(optimizer: Optimizer) -> bool:
    """Whether the optimizer's work is to be divided where all ranks have whole tensors."""
    marked: Treatment | None = vars(optimizer).get(_MARK)
    return marked is not None and marked.divides_work


def known_treatment(optimizer: Optimizer) -> Treatment | None:
    """The treatment of known classes and those that derive from them; ``None`` for others."""
    for cls in () if _is_own_work(optimizer) else _classes(optimizer):
        package, _, path = cls.__module__.partition(".")
        known_class = _BY_NAME.get(cls.__name__)
        if package == "torch":
            known_class = _OF_TORCH.get(cls.__name__)
        elif package == "bitsandbytes":
            known_class = _ELEMENTS
        elif package == "pytorch_optimizer":
            known_class = _OF_PYTORCH_OPTIMIZER.get(cls.__name__, known_class)
        elif package == "torchao" and path.startswith("optim"):
            known_class = _ELEMENTS if cls.__name__ in _OF_TORCHAO else None
        if known_class is not None:
            return known_class
    return None


def _obstacle(optimizer: Optimizer) -> str:
    """Why an optimizer cannot step tensors on the ranks that own them; empty if it can."""
    classes = _classes(optimizer)
    if _is_own_work(optimizer):
        return "its package handles sharded tensors, or keeps views of parameters, by itself: use it without whole()"
    if _is_global(optimizer):
        return "it estimates one value over all parameters, and no rank has them all in its step. Use strategy='ddp' without whole()"
    if needs_closure(optimizer):
        return "its step evaluates the loss (a closure), for which tensors cannot be lent. Use strategy='ddp' without whole()"
    if Modes([optimizer]).switched:
        return (
            "it keeps two sets of weights and switches them by train() and eval(), outside of its step; it treats each element by itself, so "
            "it needs no whole()"
        )
    if (
        inner := next((name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)), None)
    ) is not None:
        return f"it wraps another optimizer ({inner}), whose state would be lost: give whole() that one, without the wrapper"
    names = {name for cls in classes for function in vars(cls).values() for name in _names(function)}
    # Adam-mini exchanges only where these say that it holds shards by itself.
    is_alone = getattr(optimizer, "world_size", 2) <= 1 or getattr(optimizer, "model_sharding", True) is False
    if not is_alone and (collectives := sorted(names & _COLLECTIVES)):
        instead = (
            "set optimizer.world_size = 1" if hasattr(optimizer, "world_size") else "use a variant for a single device"
        )
        return (
            f"its step exchanges tensors between the ranks by itself ({collectives[0]}), for which all ranks would need the same ones. If it is "
            f"Muon, use torch.optim.Muon; otherwise {instead}, or strategy='ddp'"
        )
    return ""


def _is_global(optimizer: Optimizer) -> bool:
    return any(cls.__name__ in _GLOBAL for cls in _classes(optimizer))


def _classes(optimizer: Optimizer) -> tuple[type, ...]:
    """The class of an optimizer and those that it derives from, below torch's base class."""
    classes = type(optimizer).__mro__
    return classes[: classes.index(Optimizer)]


def _is_own_work(optimizer: Optimizer) -> bool:
    return any(cls.__module__.partition(".")[0] in _OWN_WORK for cls in _classes(optimizer))


def _names(function: Any) -> Iterator[str]:
    """The names that a function uses, also inside decorators of torch."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    if isinstance(function, FunctionType):
        codes: list[CodeType] = [function.__code__]
        while codes:
            code = codes.pop()
            yield from code.co_names
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


class Split(NamedTuple):
    """The parameters of a model, as :func:`split` divides them."""

    matrices: list[nn.Parameter]
    """The 2-D weights of hidden layers, for Muon and its kind."""
    rest: list[dict[str, Any]]
    """Parameter groups for another optimizer, such as AdamW: embeddings, the output layer and weights that are no matrices; then, with
    ``weight_decay=0.0``, norms and biases. A group without parameters is left out."""


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_OUTPUTS = frozenset(("head", "lm_head", "output", "classifier", "score", "fc_out", "to_logits", "unembed", "cls"))
"""Usual names of output layers, outside of repeated blocks."""


def split(module: nn.Module, rest: str | Sequence[str] = ()) -> Split:
    """Divide a model's trained parameters into the matrices that Muon is for, and the rest::

        matrices, rest = engine.optim.split(self)
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-4)]

    The matrices are the 2-D weights of hidden layers. Not among them are embeddings and what is tied to them, the output layer, norms, biases, and
    weights with another number of dims, such as convolutions. What is called ``emb...``, ``...embed...``, ``pos...``, ``wte`` or ``wpe`` counts as
    an embedding. The output layer is what ``get_output_embeddings()`` returns, or has a usual name (``head``, ``lm_head``, ``classifier``, ...);
    otherwise it is the last linear layer, unless that is inside of a repeated block. What is not chosen is logged.

    Args:
        module: the model, or a module that has it.
        rest: names of further parameters that are not for Muon; ``*`` stands for anything.

    Raises:
        TypeError: ``module`` is not a module.
        ValueError: no parameter has a name of ``rest``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"engine.optim.split() got {type(module).__name__}: give the model itself, an nn.Module, whose layers and names tell the matrices from "
            "the rest"
        )
    model = user_module(module)
    patterns = [rest] if isinstance(rest, str) else list(rest)
    left_out = set(
        map(id, matching(model.named_parameters(remove_duplicate=False), patterns, "engine.optim.split(rest=...)"))
    )
    left_out |= _outside_hidden_layers(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in trained.items() if p.ndim == 2 and id(p) not in left_out}
    outside = {name: p for name, p in trained.items() if name not in matrices}
    plain = [p for p in outside.values() if p.ndim < 2]
    decayed = [p for p in outside.values() if p.ndim >= 2]
    groups: list[dict[str, Any]] = [{"params": decayed}] if decayed else []
    groups += [{"params": plain, "weight_decay": 0.0}] if plain else []
    logger.info(
        "engine.optim.split: %d matrices of hidden layers; the rest: %s",
        len(matrices),
        ", ".join(name for name, p in outside.items() if p.ndim >= 2) or "norms and biases only",
    )
    return Split(list(matrices.values()), groups)


def _outside_hidden_layers(model: nn.Module) -> set[int]:
    """The ids of parameters that are embeddings, positions or the output layer's."""
    named = list(model.named_modules(remove_duplicate=False))
    inside = {id(m) for block in blocks_of(model, [], 0) for m in block.modules() if m is not block}
    embeddings = {id(m.weight) for _, m in named if isinstance(m, _EMBEDDINGS)}
    ids = set(embeddings)
    for path, module in named:
        segments = [] if id(module) in inside else path.split(".")
        for name, parameter in module.named_parameters(recurse=False):
            if any(map(_is_embedding, (*segments, name))):
                ids.add(id(parameter))
    outputs = [m for path, m in named if id(m) not in inside and path.rpartition(".")[2] in _OUTPUTS]
    for _, module in named:
        if callable(getattr(module, "get_output_embeddings", None)):
            outputs.append(module.get_output_embeddings())
    layers = [m for _, m in named if isinstance(m, nn.Linear)]
    if not any(m is not None for m in outputs) and not any(id(layer.weight) in embeddings for layer in layers):
        outputs = [layer for layer in layers[-1:] if id(layer) not in inside]
    return ids | {id(p) for output in outputs if output is not None for p in output.parameters()}


def _is_embedding(name: str) -> bool:
    """Whether a module or a parameter is called like an embedding."""
    return "emb" in name.lower() or name.lower().startswith("pos") or name in ("wte", "wpe")
