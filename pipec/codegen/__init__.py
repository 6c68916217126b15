"""From the classified graph to Python a person can read, and to the artifact on disk."""
