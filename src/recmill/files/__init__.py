"""The only place that writes atomically, syncs, locks and digests files.

`atomic`: a file or directory appears complete or not at all. `locks`: one process at a time. `digests`: is a file
still what it was?
"""
