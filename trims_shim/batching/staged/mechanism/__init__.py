"""What may run when: batches, buffers and stage executors, without a clock and decisions."""
