"""Try to break the command: bad input, corrupt files, odd environments, races and resource limits.

`python -m tests.hostile` makes seeded trials of each kind and judges what the command does. A trial is

- a *bug* if there is a traceback or an internal error, if the command hangs or crashes, succeeds with a wrong result,
  leaves a process or a temporary file behind, or executes code from a file;
- *weak* if the exit code is of the wrong kind, or the message does not name what is wrong, or is too long.
"""
