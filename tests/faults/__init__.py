"""What goes wrong around the cache: deaths, changes, lack of room, hostile peers."""
