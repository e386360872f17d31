"""What obeys staged policies with real models: threads that run stages."""
