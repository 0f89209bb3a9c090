"""Progress bars. Subclass :class:`ProgressBar` and define ``bar(shown, screen)`` for a look of your own."""

from .base import ProgressBar as ProgressBar
from .estimates import Progress as Progress
from .screen import Screen as Screen
