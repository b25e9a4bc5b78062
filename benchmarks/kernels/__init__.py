"""Measurements of the kernels: accuracy against float64, time against the straightforward code."""
