"""Transport attention in a model that was made with ``nn.MultiheadAttention``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import TypedDict

from torch import nn
from typing_extensions import Unpack

from sinkformer.attention.modules import SinkhornAttention
from sinkformer.attention.options import Marginals, Options
from sinkformer.errors import ConfigError, SinkformerWarning
from sinkformer.solvers import Gradient


class AttentionOptions(TypedDict, total=False):
    """Options of :class:`SinkhornAttention` that ``nn.MultiheadAttention`` does not have."""

    marginals: Marginals
    tau: float | None
    iterations: int | None
    tolerance: float | None
    gradient: Gradient | None


def replace_attention(
    model: nn.Module,
    *,
    select: Callable[[str, nn.MultiheadAttention], bool] | None = None,
    **options: Unpack[AttentionOptions],
) -> list[str]:
    """Put a :class:`SinkhornAttention` in the place of every ``nn.MultiheadAttention`` of a model, in place.

    Parameters stay the very same objects, with device, dtype and ``requires_grad``; training mode stays too. An optimiser
    made before goes on working, and a ``state_dict`` of either model loads into the other. Hooks on a replaced module are
    lost. The paths by which ``nn.TransformerEncoder`` and its layers compute softmax attention without calling the module,
    in ``eval`` mode, are switched off.

    What is replaced by default: everything except attention in ``nn.TransformerDecoderLayer``, both to itself and to the
    memory. There a query is usually a position that must not depend on later ones, and the share of a key depends on all
    queries. With ``marginals="queries"`` (or ``tau=0``) nothing depends on other queries, and those are replaced too.

    Args:
        model: the model; changed in place.
        select: which ones to replace instead, told by the name in ``model.named_modules()`` and the module: for example
            ``lambda name, attention: name.endswith("multihead_attn")`` for cross-attention of decoders that do not
            generate from left to right.
        **options: ``marginals``, ``tau``, ``iterations``, ``tolerance``, ``gradient`` of ``SinkhornAttention``.

    Returns:
        The names replaced, in the order of ``model.named_modules()``.

    Raises:
        ConfigError: nothing to replace, saying what was found; an option outside its range; a selected module that cannot
            be replaced (``add_bias_kv``, ``add_zero_attn``). The model is then unchanged.

    Warns:
        SinkformerWarning: subclasses of ``nn.MultiheadAttention`` were found and left: what they compute is not known.
    """
    unknown = sorted(set(options) - set(AttentionOptions.__annotations__))
    if unknown:
        raise ConfigError(
            f"expected options of {', '.join(AttentionOptions.__annotations__)}, received {', '.join(unknown)}"
        )
    checked = Options.of(**options)
    found = dict(_named(model))
    subclasses = {name: module for name, module in found.items() if type(module) is not nn.MultiheadAttention}
    plain = {name: module for name, module in found.items() if name not in subclasses}
    decoding = set() if checked.tau == 0 else _in_decoders(model)
    chosen = {
        name: module
        for name, module in plain.items()
        if (id(module) not in decoding if select is None else select(name, module))
    }
    if "" in chosen:
        raise ConfigError(
            "expected a model that contains attention, received a nn.MultiheadAttention itself, which cannot be replaced in "
            "place; use SinkhornAttention.from_torch(model)"
        )
    if not chosen:
        raise ConfigError(_nothing(plain, subclasses, select is not None))
    made: dict[int, SinkhornAttention] = {}
    for name, module in chosen.items():
        if id(module) not in made:
            try:
                made[id(module)] = SinkhornAttention.from_torch(module, **options)
            except ConfigError as error:
                raise ConfigError(f"{name} cannot be replaced: {error}") from None
    for name, module in chosen.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made[id(module)])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(x, SinkhornAttention) for x in module.modules()
        ):
            module.use_nested_tensor = False
    if subclasses:
        warnings.warn(
            f"replaced {', '.join(chosen)}; left subclasses of nn.MultiheadAttention, which may compute something else: "
            f"{_described(subclasses)}",
            SinkformerWarning,
            stacklevel=2,
        )
    return list(chosen)


def _named(model: nn.Module) -> Iterator[tuple[str, nn.MultiheadAttention]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention):
            yield name, module


def _in_decoders(model: nn.Module) -> set[int]:
    """Identities of the attention modules inside decoder layers."""
    layers = (module for module in model.modules() if isinstance(module, nn.TransformerDecoderLayer))
    return {id(x) for layer in layers for x in layer.modules() if isinstance(x, nn.MultiheadAttention)}


def _nothing(plain: dict[str, nn.MultiheadAttention], subclasses: dict, selected: bool) -> str:
    """Why nothing is replaced."""
    message = "expected a model with a nn.MultiheadAttention to replace, found none"
    if plain and selected:
        message = f"expected select to choose a module, found {', '.join(plain)} and chose none"
    elif plain:
        message = (
            f"expected attention outside of nn.TransformerDecoderLayer, found only {', '.join(plain)}: shares of keys "
            f"depend on all queries, also on later ones. Choose with select= what to replace all the same"
        )
    if subclasses:
        message += f"; subclasses are left, since they may compute something else: {_described(subclasses)}"
    if not plain and not subclasses:
        message += (
            "; attention that a model computes with functions cannot be found: call "
            "sinkformer.attention.sinkhorn_attention there in the place of scaled_dot_product_attention"
        )
    return message


def _described(modules: dict) -> str:
    return ", ".join(f"{name} ({type(module).__name__})" for name, module in modules.items())
