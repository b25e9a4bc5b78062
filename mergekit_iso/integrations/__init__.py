"""What connects the package to other tools; nothing else in it depends on this."""
