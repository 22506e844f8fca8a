"""`python -m t5fastpatch` is the program `t5fastpatch`."""

from .cli import entry

entry()
