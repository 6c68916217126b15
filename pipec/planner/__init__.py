"""Where to cut: optimisation over plain numbers, without torch."""
