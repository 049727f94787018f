"""Philox4x32-10 in Python; tests/compile/test_rng.py compares it with the published answers."""

ONES = 2**32 - 1


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's integers, from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & ONES, (a >> 32) ^ c[3] ^ k[1], a & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c
