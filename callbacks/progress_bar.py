"""Earlier import path of :class:`callbacks.RichProgressBar`, still supported."""

from .progress.rich_bar import RichProgressBar as RichProgressBar
