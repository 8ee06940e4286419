"""Admission and ordering: who is sent to an engine next, who waits, who is refused. Pure."""
