"""What several test files share; `tests/` is on the import path, so `from support.bitwise import bits`."""
