"""The artifact: what a compilation leaves for the runtime, in memory or in a directory on disk.

``artifact`` defines it, writes it and reads it; ``verification`` verifies one without running its code.
"""
