"""Shared test support: a scriptable upstream, a raw client, the real gateway process."""
