"""Who holds the memory of tensors, how much of it there is, and what the system is told of it."""
