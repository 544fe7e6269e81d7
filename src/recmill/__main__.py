"""`python -m recmill` is the `recmill` command; torchrun needs a module."""

import sys

from recmill.launch.early import begin


def main() -> None:
    begin()  # before the imports of the command line, which take 0.1 s or, on a busy machine, seconds
    from recmill.launch.processes import start_ahead

    start_ahead(sys.argv[1:])
    from recmill import cli

    cli.main()


if __name__ == "__main__":
    main()
