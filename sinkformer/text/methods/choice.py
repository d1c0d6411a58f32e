"""What a user may pass as ``method``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sinkformer.errors import ConfigError, DTypeError
from sinkformer.text.methods.argmax import Argmax
from sinkformer.text.methods.balanced import Balanced
from sinkformer.text.methods.itermax import IterMax
from sinkformer.text.methods.partial import Partial
from sinkformer.text.methods.protocol import Method
from sinkformer.text.methods.unbalanced import Unbalanced

# By name; the first is the default. A factory takes those of the aligner's options that mean something to its method.
METHODS: dict[str, Callable[..., Method]] = {
    "partial": Partial,
    "balanced": Balanced,
    "unbalanced": Unbalanced,
    "argmax": Argmax,
    "itermax": IterMax,
}


def as_method(
    method: str | Method | None,
    *,
    null_price: float | None = None,
    epsilon: float | None = None,
    threshold: float | None = None,
) -> Method:
    """Turn what a user may pass as ``method`` into a method.

    Args:
        method: a name, a ``Method``, or None for the default.
        null_price: for a method that has one; the others leave it to the distance.
        epsilon: option of the method; None: its default.
        threshold: the same.

    Raises:
        ConfigError: an unknown name, an option without meaning for this method, or one beside a ``Method`` object.
        DTypeError: neither a name nor a ``Method``.
    """
    method = next(iter(METHODS)) if method is None else method
    if isinstance(method, str):
        if method not in METHODS:
            raise ConfigError(f"expected a known method, received {method!r}; {_names()}")
        has_price = "null_price" in inspect.signature(METHODS[method]).parameters
    elif isinstance(method, Method) and not isinstance(method, type):
        has_price = "null_price" in method.settings
    else:
        raise DTypeError(f"expected method as a name or a Method, received {type(method).__name__}; {_names()}")
    options = {"null_price": null_price if has_price else None, "epsilon": epsilon, "threshold": threshold}
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(method, str):
        return _named(method, given)
    if given:
        name = next(iter(given))
        raise ConfigError(
            f"{name}={given[name]!r} was given beside the method {type(method).__name__}(...); give it to the method"
        )
    return method


def _named(method: str, given: dict[str, Any]) -> Method:
    known = inspect.signature(METHODS[method]).parameters
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{name}={value!r} has no meaning for the method {method!r}; leave it out")
    return METHODS[method](**given)


def _names() -> str:
    return "the methods are " + ", ".join(repr(name) for name in METHODS) + ", and 'trained' where there is an aligner"
