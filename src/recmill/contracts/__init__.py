"""Checks that every model, dataset and metric must pass; a check that fails raises `Broken`.

`recmill check-plugin` runs them on a plug-in, and tests/contracts on the built-in ones. The name of a check is the fact
that it checks.
"""


class Broken(Exception):  # noqa: N818  # the word that a check is read with
    """A plug-in fails a check of its contract."""


def expect(holds: bool, otherwise: str) -> None:
    """Raise `Broken` with the message `otherwise`, unless the condition holds."""
    if not holds:
        raise Broken(otherwise)
