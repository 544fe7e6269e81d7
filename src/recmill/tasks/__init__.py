"""Tasks: what a model learns. Each module has the functions of `recmill.protocols.TaskModule`."""
