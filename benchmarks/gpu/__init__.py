"""The engines on a GPU: correct, and how fast beside peers and beside the card's own limits. ``python -m benchmarks.gpu``."""
