"""Drivers: each joins one pure core to the event loop and holds its timer."""
