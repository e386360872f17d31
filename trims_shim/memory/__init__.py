"""Memory that images live in: segments on the daemon's side, mappings on the client's."""
