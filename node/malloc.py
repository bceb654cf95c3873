"""How the C library keeps memory: glibc's alone; elsewhere these do nothing."""

from __future__ import annotations

import contextlib
import ctypes

_M_ARENA_MAX = -8  # malloc.h


def one_pool() -> None:
    """From now on all threads allocate from one pool. Call it before there are any.

    By default each thread gets a pool of its own, and what one has freed the others cannot use: a node whose probe,
    training and checks run in different threads then holds some 15 MiB more.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return what is free to the system."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
