"""The ways of running T5 that scripts/bench_peers.py compares, a file for each library."""

from __future__ import annotations

from . import ctranslate2_peers, hugging_face, nai, onnx_runtime

PEERS = (
    *hugging_face.EAGER,
    *nai.EAGER,
    *hugging_face.COMPILED,
    *nai.COMPILED,
    *onnx_runtime.PEERS,
    *ctranslate2_peers.PEERS,
)
"""Stock first; those that compile, which takes long, behind those that do not."""
