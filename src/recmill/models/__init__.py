"""Models: each module has the functions of `recmill.protocols.ModelModule`, and imports torch only to build."""
