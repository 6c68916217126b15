"""The artifact: what a compilation leaves for the runtime, in memory or in a directory on disk.

``directory`` defines it, writes it and reads it; ``check`` verifies one without running its code.
"""
