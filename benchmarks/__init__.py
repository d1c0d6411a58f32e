"""Scripts that produce the figures of the documentation. Not part of the installed package."""
