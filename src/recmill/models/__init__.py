"""Models: each module declares its Config, its embedding tables and how to build its network. No torch at import.

The functions of a model are those of `recmill.protocols.ModelModule`.
"""
