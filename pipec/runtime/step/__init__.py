"""Runs the steps of a program on the ranks of this process: linking, interpreting, synchronising."""
