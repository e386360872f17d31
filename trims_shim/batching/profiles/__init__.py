"""How long batches take: measured, learned from every batch, and kept in files."""
