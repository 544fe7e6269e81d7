"""Timestamps in files."""

import time


def utc_now() -> str:
    """Return the current time in UTC, like 2026-01-31T23:59:59Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
