"""The command line, one module per command: gpu-vecenv list | show | new | check | train | …."""
