"""Digest of a flat tensor, the same on every machine for the same bits."""

from __future__ import annotations

import hashlib

import torch


def parameter_digest(flat: torch.Tensor) -> bytes:
    """SHA-256 (32 bytes) of the dtype, the length and the little-endian bytes of a 1-D tensor.

    Reads a contiguous CPU tensor in place; one on another device is copied to the CPU first.

    Raises:
        ValueError: the tensor is not 1-D or not contiguous.
    """
    if flat.ndim != 1 or not flat.is_contiguous():
        raise ValueError(f"only a contiguous 1-D tensor has a digest, not one of shape {tuple(flat.shape)}")
    digest = hashlib.sha256(f"{flat.dtype}:{flat.numel()}:".encode())
    digest.update(flat.detach().cpu().view(torch.uint8).numpy().data)
    return digest.digest()
