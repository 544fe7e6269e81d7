"""Holds `launch`."""
