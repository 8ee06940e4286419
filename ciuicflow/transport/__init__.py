"""Bytes between the KV agents of two shards; base.py has the interface, table.py the schemes."""
