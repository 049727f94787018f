"""Recorded episodes: as arrays, as replay files, and on a page that plays them."""
