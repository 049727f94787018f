"""One module per peer: its ``PEER`` and ``prepare``. They import the peer in functions only."""

PEERS = (
    "gymnasium",
    "mpe2",
    "sisl",
    "classic",
    "overcooked_ai",
    "rware",
    "ai_economist",
    "envpool",
    "pufferlib",
    "gymnax",
    "purejaxrl",
    "jaxmarl",
    "pgx",
    "vmas",
    "warpdrive",
)
