"""What obeys policies with real batches: threads, event loops, and what both have in common."""
