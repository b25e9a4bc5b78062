"""Checkpoints on disk: finding, reading, aligning, writing and verifying them."""
