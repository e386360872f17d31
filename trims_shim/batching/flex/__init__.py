"""Several models on the same devices, with preemption (Shepherd's Flex)."""
