"""Which endpoint takes a request: pure decisions over the ledger of endpoints."""
