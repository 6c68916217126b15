"""How ranks exchange tensors: point to point and in collectives, in one process and between several."""
