"""How long stages take: measured, learned, kept in files, and what follows from it."""
