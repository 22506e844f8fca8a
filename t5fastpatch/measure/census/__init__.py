"""What one call does, counted exactly."""

from .counting import census
from .work import Census, Work

__all__ = ["Census", "Work", "census"]
