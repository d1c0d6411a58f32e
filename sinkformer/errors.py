"""Every exception and warning of the package.

Messages say what was expected, what was received, and what to do about it. User mistakes are subclasses of the built-in
exception a caller would expect, so that ``except ValueError`` keeps working.
"""


class SinkformerError(Exception):
    """Base class of every error raised by sinkformer."""


class ShapeError(SinkformerError, ValueError):
    """Sizes or batch shapes of the arguments do not fit together."""


class DTypeError(SinkformerError, TypeError):
    """A tensor has a dtype, or an argument a type, that the operation cannot use."""


class DeviceError(SinkformerError, ValueError):
    """Tensors of one call live on different devices."""


class WeightError(SinkformerError, ValueError):
    """Weights are negative, do not sum to one, or two total masses differ."""


class NonFiniteError(SinkformerError, ValueError):
    """A NaN or an infinity stands where a finite number is needed."""


class ConfigError(SinkformerError, ValueError):
    """An option has a value outside its range, or a configuration an unknown key."""


class InfeasibleError(SinkformerError, ValueError):
    """No coupling of the two measures avoids the forbidden pairs."""


class DatasetError(SinkformerError, ValueError):
    """Pairs of sequences that no network of the interpolation theorem maps one to the other."""


class PrecisionError(SinkformerError, ValueError):
    """Numbers that are too close, or too far apart, for the dtype they shall be stored in."""


class ConvergenceError(SinkformerError, RuntimeError):
    """A solver stopped before it reached its tolerance, and was asked to raise."""


class BackendError(SinkformerError, RuntimeError):
    """The engine that was asked for cannot solve the problem."""


class DistributedError(SinkformerError, RuntimeError):
    """A process of a group was lost, or processes that work together were asked for different things."""


class ModelError(SinkformerError, RuntimeError):
    """A stored model cannot be loaded: missing, damaged, or not the one expected."""


class TextError(SinkformerError, ValueError):
    """A text, or a list of texts, that cannot be processed."""


class FormatError(SinkformerError, ValueError):
    """A line of a file does not follow its format."""


class MissingExtraError(SinkformerError, ImportError):
    """An optional dependency is needed and not installed.

    Args:
        extra: the extra of sinkformer that brings it, for example ``"text"``.
        package: the package that could not be imported.
    """

    def __init__(self, extra: str, package: str):
        """Build the message from the extra and the package."""
        self.extra, self.package = extra, package
        super().__init__(
            f"this needs the package {package!r}, which is not installed; "
            f"install it with: pip install 'sinkformer[{extra}]'"
        )


class SinkformerWarning(UserWarning):
    """Base class of every warning given by sinkformer."""


class ConvergenceWarning(SinkformerWarning):
    """A solver stopped before it reached its tolerance."""


class PrecisionWarning(SinkformerWarning):
    """A result is right, but rounding might have had it otherwise."""


class GradientWarning(SinkformerWarning):
    """A derivative may be less accurate than asked for."""


class TextWarning(SinkformerWarning):
    """Something in a text was handled in a way the user should know."""
