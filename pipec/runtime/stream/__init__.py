"""Periodic programs: mini-batches flow through a pipeline that is not flushed."""
