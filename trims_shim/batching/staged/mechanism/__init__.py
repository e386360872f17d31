"""What may run when: batches, buffers and queues, without a clock and decisions."""
