"""`python -m recmill` is the `recmill` command; torchrun needs a module."""

from recmill.cli import main

if __name__ == "__main__":
    main()
