"""How processes find each other, and know which are alive, waiting or failed."""
