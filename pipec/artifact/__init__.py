"""The artifact, and the directory on disk that holds one: write, read, check."""
