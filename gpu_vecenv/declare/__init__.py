"""The declaration of games: configuration, state fields, roles, spaces, drawing. Imports neither torch nor CUDA."""
