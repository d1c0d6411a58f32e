"""An alignment as lines for a terminal and as a page of HTML, and the pieces other pages are made of."""

from sinkformer.text.pages.html import document, grid, page, sentence
from sinkformer.text.pages.terminal import table, width
from sinkformer.text.pages.words import direction, visible

__all__ = ["direction", "document", "grid", "page", "sentence", "table", "visible", "width"]
