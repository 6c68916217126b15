"""A step of a program on the ranks of this process: linked, interpreted, and brought to its end."""
