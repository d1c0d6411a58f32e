"""``python -m sinkformer.cli``."""

from sinkformer.cli import main

main()
