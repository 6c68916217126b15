"""The memory of tensors: sharing, measuring, caching, and the settings of the allocator."""
