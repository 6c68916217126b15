"""Processes find each other, and know which of them are alive, waiting or failed."""
