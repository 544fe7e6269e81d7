"""What every model, dataset and metric must do, as checks that raise `Broken`.

`recmill check-plugin` runs them on a plug-in, tests/contracts on those that are built in. The name of a check is the
fact that it checks.
"""


class Broken(Exception):  # noqa: N818  # the word that a check is read with
    """A plug-in does not keep its contract."""


def expect(holds: bool, otherwise: str) -> None:
    """Raise `Broken` with the message `otherwise`, unless the condition holds."""
    if not holds:
        raise Broken(otherwise)
