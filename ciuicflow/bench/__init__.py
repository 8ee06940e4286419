"""Benchmarks: what the gateway costs, measured beside its peers in the same run."""
