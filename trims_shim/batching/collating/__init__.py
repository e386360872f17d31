"""From items to a batch, and from a batch's results to answers: stack, pad, split."""
