"""Every GPU kernel checked against float64 and timed on a model's matrices, in one command."""
