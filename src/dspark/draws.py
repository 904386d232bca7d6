"""Random numbers that depend on names alone: the same in every run and on every machine, in whatever order drawn."""

import hashlib


def draw(*names: object) -> float:
    """A number in [0, 1) that depends on the names alone."""
    return draw_integer(*names) / 2**64


def draw_integer(*names: object) -> int:
    """An integer in [0, 2**64) that depends on the names alone: the seed of one request."""
    return int.from_bytes(hashlib.sha256(repr(names).encode()).digest()[:8], "little")
