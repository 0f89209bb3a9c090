"""The earlier place of :class:`callbacks.RichProgressBar`, still importable."""

from .progress.rich_bar import RichProgressBar as RichProgressBar
