"""One stage on its rank: its code, its tensors, and what its replicas do together."""
