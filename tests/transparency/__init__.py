"""The transparency proof: with the cache and without it, a program observes the same."""
