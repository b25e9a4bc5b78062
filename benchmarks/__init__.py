"""Measurements of the library's parts, each made again by one command."""
