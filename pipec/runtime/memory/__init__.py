"""The memory of tensors: who uses it, how much there is, and how the allocator manages it."""
