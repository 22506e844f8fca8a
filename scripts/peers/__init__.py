"""The ways of running T5 that scripts/bench_peers.py compares, a file for each library."""

from __future__ import annotations

from . import hugging_face, nai

PEERS = (*hugging_face.PEERS, *nai.PEERS)
