"""The rules that programs keep, each a function of the ``ProgramIndex`` that yields violations."""
