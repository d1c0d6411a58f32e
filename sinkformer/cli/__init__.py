"""The command line: ``sinkformer couple | align | evaluate | w1 | interpolate | info``. Results on stdout, words on stderr."""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> None:
    """Entry point. Without the extra ``cli`` one sentence says how to install it."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(
            f"error: the command line needs the package {error.name!r}, which is not installed; "
            "install it with: pip install 'sinkformer[cli]'",
            file=sys.stderr,
        )
        sys.exit(1)
    # After the check: importing the application imports typer and rich.
    app = import_module("sinkformer.cli.app").app
    app(prog_name="sinkformer")
