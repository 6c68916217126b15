"""Why pipec refuses a model, in a few words: what the messages of its errors have in common."""

import re

CAUSES = {
    "a custom backward is lost in export": r"would be lost",
    "a branch on values": r"A Python `if` or `while` asks for the value|Data-dependent size or branch",
    "a value becomes a number or a size": r"becomes a Python number|data-dependent\s+size decides",
    "an attention mask whose values are read": r"looks at the values of an attention mask",
    "a packed sequence": r"pack_(padded_)?sequence",
    "a generator of the model's own": r"seeds every draw",
    "traced otherwise than run": r"while it is traced",
    "drawn outside of torch": r"the model draws from",
    "an argument is changed in place": r"changes its argument",
    "a branch on what microbatches change or do not tell": r"microbatches do not tell|microbatches change",
    "caches": r"past_key_values|use_cache|a cache",
    "another number of rows": r"may be other rows|which arguments hold the batch",
    "too few operators for so many stages": r"stages",
    "a call that torch cannot trace": r"Replace the call on that line",
}
"""Names of causes with a pattern that finds them in a message. The first that is found counts."""

OTHER = "another cause"


def cause_of(message: str) -> str:
    return next((cause for cause, pattern in CAUSES.items() if re.search(pattern, message)), OTHER)
