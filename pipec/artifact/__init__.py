"""The artifact: what a compilation leaves for the runtime, in memory or in a directory on disk.

``artifact`` defines, writes and reads it; ``verification`` checks it without running its code.
"""
