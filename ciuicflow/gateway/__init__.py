"""The HTTP edge: start reading in handler.py."""
