"""Tests read errors as the command line prints them, in all processes that they start."""

from recmill import errors

errors.names_flags = True
