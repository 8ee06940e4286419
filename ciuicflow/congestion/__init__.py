"""How fast a path between two shards may be filled. Pure; time in nanoseconds."""
