"""The only package that writes atomically, syncs, locks and digests files.

`atomic`: files and directories appear complete or not at all. `locks`: one process at a time. `digests`: detect changed
files.
"""
