"""Captured graphs on disk, so that a later process need not capture the same model again."""

from pipec.graph_cache.cache import capture

__all__ = ["capture"]
