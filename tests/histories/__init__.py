"""Programs whose process is forked, exits or is interrupted; `python -m tests.histories NAME`.

Each prints what it saw, one thing a line, and `test_histories.py` reads it.
"""

import atexit

late = []
# Registered before any part of the package imports anything else, so that it runs after every other
# exit handler.
atexit.register(lambda: [function() for function in late])


def say(*words):
    print(*words, flush=True)
