"""Plans read off a graph, what they need of memory, what they predict, and how they are shown."""
