"""Operator norms from above: certified, not estimated, and cheap enough for the largest models.

Power iteration comes to a norm from below, which proves nothing. The Frobenius norm of a high power bounds it from
above: rho(M)^k = rho(M^k) <= ||M^k||_F, within a factor n^(1/2k) for a positive semidefinite M. That takes matrix
products alone, whose rounding is counted along the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

# Wider matrices are bounded by column blocks: Gram matrices and their powers for each, an eighth of the work at 4096.
WIDEST, BLOCK = 1024, 512

SQUARINGS = 6  # k = 64: for n = 1024 at most 5.6% too much of a squared norm, in practice 1% and less

# What a Gram matrix is off by at most, as a share of its trace. In fp64: 2**-53 for each of up to 65,536 rows, twice.
_GRAM_ERROR = 2.0**-36
# With products in fp32 of PIECE rows at a time, summed in fp64: 2**8 * 2**-24, and two roundings before.
PIECE = 256
_NARROW_GRAM_ERROR = 2.0**-15


def grams(rows: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The Gram matrices A_b^T A_b of a matrix's blocks of columns, from products in fp32 where that is what they are.

    Args:
        rows: the matrix in pieces, each (at most PIECE rows, columns) in fp64; one after the other is read.

    Returns:
        One matrix, or for more than 1,024 columns one for each block of 512.
    """
    sums: list[torch.Tensor] = []
    for piece in rows:
        narrow = piece.float() if _fp32_is_fp32(piece) else piece
        products = [
            block.T @ block for block in torch.split(narrow, BLOCK if piece.shape[1] > WIDEST else WIDEST, dim=1)
        ]
        if not sums:
            sums = [product.new_zeros(product.shape, dtype=torch.float64) for product in products]
        for total, product in zip(sums, products, strict=True):
            total.add_(product)
    return sums


def _fp32_is_fp32(piece: torch.Tensor) -> bool:
    """Whether products in fp32 are that, and no tf32 or bfloat16 as a program may have asked for."""
    return piece.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest"


def squared_norm(blocks: Sequence[torch.Tensor]) -> float:
    """An upper bound of the squared operator norm of a matrix, from the Gram matrices of its blocks of columns.

    With more than one block it rests on ||[A_1 ... A_k]||^2 <= ||A_1||^2 + ... + ||A_k||^2, which is 4.5 times too much
    for the 8 blocks of a random 10240 x 4096 matrix.
    """
    # Symmetric matrices' eigenvalues move by no more than a perturbation's norm (Weyl).
    error = _NARROW_GRAM_ERROR * sum(float(_trace(block)) for block in blocks)
    return error + sum(float(largest_eigenvalue((block + block.T) / 2)) for block in blocks)


def largest_eigenvalue(gram: torch.Tensor) -> torch.Tensor:
    """An upper bound of the largest eigenvalue of Gram matrices.

    Args:
        gram: (..., n, n) in fp64.

    Returns:
        (...).
    """
    return _spectral_radius(gram, _GRAM_ERROR * _trace(gram))


def largest_pairing(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """An upper bound of ||A^T B||, the most that (Ax).(By) gives for unit vectors x and y.

    Args:
        first, second: (..., n, n) in fp64: A A^T and B B^T.

    Returns:
        (...).
    """
    return _spectral_radius(first @ second, 3 * _GRAM_ERROR * _trace(first) * _trace(second)).sqrt()


def _spectral_radius(matrices: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """An upper bound of the spectral radius of matrices that are known but for an error, a Frobenius norm."""
    power, logarithm = matrices, torch.zeros_like(error)
    for squaring in range(SQUARINGS):
        size = _size(power).clamp(min=1e-200)
        logarithm = logarithm + size.log() / 2**squaring
        power, error = power / size[..., None, None], error / size
        power = power @ power
        # Of (M + E)^2, and of the product's sums in fp64.
        error = 2 * error + error**2 + power.shape[-1] * 2.0**-52
    radius: torch.Tensor = (logarithm + (_size(power) + error).log() / 2**SQUARINGS).exp()
    return radius


def _size(matrices: torch.Tensor) -> torch.Tensor:
    size: torch.Tensor = torch.linalg.matrix_norm(matrices)
    return size


def _trace(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)
