"""Fakes that ship with the package: an inference engine, its HTTP server, child processes."""
