"""Games in a browser: a page that steps the game's own source as WebAssembly."""
