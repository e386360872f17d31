"""The side of the cache that lives in user processes."""
