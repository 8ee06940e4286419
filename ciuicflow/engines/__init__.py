"""What engines say about themselves, and how they want to be told: one adapter each. Pure."""
