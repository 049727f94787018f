"""Small games that have what no bundled game has; only tests use them."""
