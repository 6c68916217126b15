"""The rules that programs keep, each a function of the ``ProgramIndex`` that yields violations.

The verifier raises the first violation, so a rule goes on as if there had been none before.
"""
