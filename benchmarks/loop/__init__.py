"""The outer step measured."""
