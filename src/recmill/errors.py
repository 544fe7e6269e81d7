"""What a user can cause, one class per exit code. Anything else that escapes is a defect of ours."""

import errno


class UserError(Exception):
    """One sentence of fact with the place and the value, one of remedy."""

    exit_code = 1
    kind = "error"
    rank: int | None = None  # of the process that it happened in, where known
    restarts = 0  # how often the job had been started again


class Preempted(UserError):  # noqa: N818 - not an error: an end
    """A scheduler's signal ended the run: what was trained is saved, and it goes on later."""

    exit_code = 75
    kind = "preempted"
    signal = ""


class Interrupted(UserError):  # noqa: N818
    """The same by Ctrl-C."""

    exit_code = 130
    kind = "interrupted"
    signal = ""


class ConfigError(UserError):
    exit_code = 2
    kind = "config error"


class DataError(UserError):
    exit_code = 3
    kind = "data error"


class CheckpointError(UserError):
    exit_code = 4
    kind = "checkpoint error"


class ResourceError(UserError):
    """Memory, disk, permissions, a run directory that somebody else uses."""

    exit_code = 5
    kind = "resource error"


_KINDS = (UserError, ConfigError, DataError, CheckpointError, ResourceError, Preempted, Interrupted)
KINDS: dict[str, type[UserError]] = {kind.__name__: kind for kind in _KINDS}

_OUT_OF_MEMORY = ("can't allocate memory", "CUDA out of memory")
_REMEDIES = {
    errno.EACCES: "Choose a place you may write to, or change its permissions.",
    errno.EPERM: "Choose a place you may write to, or change its permissions.",
    errno.EROFS: "The file system is read-only: choose another place.",
    errno.ENOSPC: "The disk is full: free some space or choose another disk, then run the same command again.",
    errno.EDQUOT: "Your quota is used up: free some space or choose another disk, then run the same command again.",
    errno.EIO: "The disk reports an error: look at the system's log, and choose another disk.",
    errno.EEXIST: "Something of that name is in the way, perhaps a file: choose another place.",
    errno.ENOTDIR: "A part of this path is a file: choose another place.",
    errno.EISDIR: "This is a directory where a file was expected.",
    errno.ENOMEM: "There is not enough memory: use fewer processes, smaller tables or a smaller batch.",
}


def as_user_error(error: BaseException) -> UserError | None:
    """The same fact as a UserError, if a user or a machine can cause it; None for our own defects."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        place = f"{error.filename}: " if error.filename else ""
        return ResourceError(f"{place}{error.strerror}. {_REMEDIES[error.errno]}")
    if isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY):
        return ResourceError(f"Out of memory ({error}). {_REMEDIES[errno.ENOMEM]}")
    return None
