"""Prints the figures of all scenarios, or of those whose names contain an argument.

Run in tests/: ``PYTHONPATH=.. python -m simulation [PART ...]``. ``share`` is useful tokens per
second over what the engine does with the same requests when it never lacks work and nothing is in
front of it; ``queued`` is the mean number of requests waiting inside the engine.
"""

import sys

from simulation.scenarios import HEADER, SCENARIOS, SEEDS, describe, run

print(HEADER)
for name in SCENARIOS:
    if not sys.argv[1:] or any(part in name for part in sys.argv[1:]):
        for seed in SEEDS:
            print(describe(name, run(name, seed)), flush=True)
