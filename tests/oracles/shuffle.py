"""The order of a learner's rows as cuda/learner/minibatch.cu has it, in Python's integers."""

from oracles.philox import ONES, philox

ROUNDS, FEWEST_BITS = 8, 8


def finalised(x: int) -> int:
    """The last part of SplitMix64, from the paper."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def keys_of(seed: int, epoch: int) -> list[int]:
    """One of 32 bits a round, by philox."""
    keys = []
    for block in range(ROUNDS // 4):
        keys += philox([epoch & ONES, epoch >> 32, block, ONES], [seed & ONES, seed >> 32])
    return keys


def permuted(row: int, rows: int, keys: list[int]) -> int:
    """Where a Feistel network on halves of as many bits, or one more on the right, leads within ``rows``."""
    bits = max(FEWEST_BITS, (rows - 1).bit_length())
    while True:
        wide, narrow = bits - bits // 2, bits // 2
        left, right = row >> wide, row % 2**wide
        for key in keys:
            # What comes in on the left goes out on the right, as wide as it was.
            left, right = right, left ^ finalised(right ^ key) >> 64 - narrow
            wide, narrow = narrow, wide
        row = left << wide | right
        if row < rows:
            return row


def order_of(seed: int, epoch: int, rows: int) -> list[int]:
    """Row numbers in the order of an epoch."""
    keys = keys_of(seed, epoch)
    return [permuted(row, rows, keys) for row in range(rows)]
