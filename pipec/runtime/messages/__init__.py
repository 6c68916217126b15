"""How ranks exchange tensors: point to point and together, in one process and between several."""
