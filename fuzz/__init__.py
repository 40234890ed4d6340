"""A fuzzer for whole runs: random configurations, faults at random moments, resumes, and an audit after each of them.

    make fuzz ARGS="--minutes 10 --seed 1"

`draw` draws what is tried, `child` runs the command `sortedrl` in a forked process and causes the faults, `hits` notes
which lasting ones happened, `oracle` says what must be refused, `audit` reads the ledger with SQL of its own, `judge`
decides whether what came out is right, `shrink` makes a failure small, `planted` holds defects that the fuzzer must
find, and `disk` replays the writes of a run with unflushed ones dropped.
It needs Linux and a C compiler: `syscalls.c` counts the calls that change files.
"""
