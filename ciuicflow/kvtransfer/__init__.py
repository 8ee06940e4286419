"""What KV cache is sent in which order, and when a transfer is whole. Pure: ranges and ids only."""
