"""Run the program that the command line names."""

import sys

from tests.histories import exits, forks, interruptions, waits

PROGRAMS = {
    "fork": forks.fork,
    "fork_fresh": forks.fork_fresh,
    "exit": exits.exit,
    "interrupt": interruptions.interrupt,
    "interrupt_a_request": interruptions.interrupt_a_request,
    "wait": waits.wait,
}


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
