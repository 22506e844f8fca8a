"""What one call does, counted exactly."""

from .counting import census
from .live import peak_live_bytes
from .work import Census, Work

__all__ = ["Census", "Work", "census", "peak_live_bytes"]
