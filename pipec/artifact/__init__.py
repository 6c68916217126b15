"""The artifact: what a compilation leaves for the runtime, in memory or in a directory on disk.

``artifact`` defines, writes, reads and checks it; ``interface`` is what the code of its stages must keep.
"""
