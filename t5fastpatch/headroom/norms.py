"""Operator norms from above: certified, not estimated, and cheap enough for the largest models."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Wider matrices are bounded by column blocks: a Gram matrix and its eigenvalues for each, instead of one of all.
BLOCK = 1024

# An eigenvalue is off by a modest multiple of n * 2**-53 times the largest one (LAPACK Users' Guide, 4.7), and so is a
# Gram matrix by the number of rows times 2**-53 times its trace: both far less than this.
_RELATIVE_SLACK = 2.0**-24


def grams(matrix: torch.Tensor) -> list[torch.Tensor]:
    """The Gram matrices A_b^T A_b of a matrix's blocks of columns.

    Args:
        matrix: (rows, columns) in fp64.

    Returns:
        One for each block of at most 1,024 columns.
    """
    return [block.T @ block for block in torch.split(matrix, BLOCK, dim=-1)]


def squared_norm(blocks: Sequence[torch.Tensor]) -> float:
    """An upper bound of the squared operator norm of a matrix, from the Gram matrices of its blocks of columns.

    With one block it is the norm but for rounding; with more, ||[A_1 ... A_k]||^2 <= ||A_1||^2 + ... + ||A_k||^2, which
    is 2.6 times too much for 4 blocks of a random 10240 x 4096 matrix.
    """
    return sum(float(largest_eigenvalue(block)) for block in blocks)


def largest_eigenvalue(matrices: torch.Tensor) -> torch.Tensor:
    """An upper bound of the largest eigenvalue of positive semidefinite matrices.

    Args:
        matrices: (..., n, n) in fp64, symmetric but for rounding.

    Returns:
        (...), not below the largest eigenvalue of what the matrices stand for.
    """
    trace = matrices.diagonal(dim1=-2, dim2=-1).sum(-1)
    return torch.linalg.eigvalsh(matrices)[..., -1].clamp(min=0) + _RELATIVE_SLACK * trace


def largest_pairing(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """An upper bound of ||A^T B||, the most that (Ax).(By) gives for unit vectors x and y.

    Args:
        first, second: (..., n, n) in fp64: A A^T and B B^T.

    Returns:
        (...).
    """
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    trace = [each.diagonal(dim1=-2, dim2=-1).sum(-1) for each in (first, second)]
    squared = largest_eigenvalue(root.mT @ second @ root) + _RELATIVE_SLACK * trace[0] * trace[1]
    return squared.sqrt()
