"""Speculation: tokens that are guessed from what was said before, and taken through the model along with others."""

from typing import Literal

SpeculateMode = Literal["auto", "off"]

PASS_COSTS = 1.1, 1.2, 1.3, 1.65, 1.9, 2.15, 2.4
"""Time of a pass with so many guesses, relative to a step, before any was measured: products take four vectors at a
time. More are not made at once."""

SPECULATED_BYTES, SPECULATED_SHARE = 2 << 20, 1 / 8
"""What guesses may take, with their logits and what is noted to take them back: so many bytes, or this part of the
cache if that is more."""

SPECULATED_LOGITS = 3
"""Tokens of a pass whose logits are computed at once; those of the next ones follow if these were guessed."""

SEARCHED_TOKENS = 1 << 15
"""The newest tokens of a conversation, among which the last ones are looked for."""

MATCHED_TOKENS = 16
"""The longest sequence that is looked for; tokens that follow longer ones are not guessed better."""

STRUCTURE, FORCED = 17, 18
"""Beside the lengths of sequences: guesses where a grammar leaves no text free, and those of text that it leaves no
choice of, but of how it is divided into tokens."""

RIGHT_GUESSES = {1: 0.3, 2: 0.3, 3: 0.5, 4: 0.65, 6: 0.8, 10: 0.9, STRUCTURE: 0.8, FORCED: 0.95}
"""Fractions of guesses that are right after sequences of at least so many tokens, before any were made. One is enough
where a grammar has a say."""

MAX_COST_FACTOR = 10.0
"""Costs above so many times `PASS_COSTS` are those of a machine that does something else."""

MIN_GAIN = 1.05
"""How much faster a pass with guesses has to be than steps, as far as is known."""
