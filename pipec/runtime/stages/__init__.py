"""One stage on its rank: its code, its tensors, and the collectives of its replicas."""
