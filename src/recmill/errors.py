"""Errors that a user or a machine can cause, one class per exit code. Any other exception is an internal error."""

import errno


class UserError(Exception):
    """An error whose message names the place, the wrong value, and a remedy."""

    exit_code = 1
    kind = "error"
    rank: int | None = None  # of the process in which it happened, if known
    restarts = 0  # of the job, before this error
    signal = ""  # that stopped the run, if one did


class Preempted(UserError):  # noqa: N818 - the run ended as it should
    """A scheduler's signal stopped the run; its progress is saved, and it can be resumed."""

    exit_code = 75
    kind = "preempted"


class Interrupted(UserError):  # noqa: N818
    """Ctrl-C stopped the run; its progress is saved, and it can be resumed."""

    exit_code = 130
    kind = "interrupted"


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
    """Memory, disk or permissions are missing, or another process uses the run directory."""

    exit_code = 5
    kind = "resource error"


class LostPeerError(ResourceError):
    """Another process of the job is missing or has ended: a consequence, whose cause that process reports."""


_KINDS = (UserError, ConfigError, DataError, CheckpointError, ResourceError, Preempted, Interrupted)
KINDS: dict[str, type[UserError]] = {kind.__name__: kind for kind in _KINDS}

_OUT_OF_MEMORY = ("can't allocate memory", "CUDA out of memory")  # as torch says it
_REMEDIES = {
    errno.EACCES: "Choose a directory that you may write to, or change its permissions.",
    errno.EPERM: "Choose a directory that you may write to, or change its permissions.",
    errno.EROFS: "The file system is read-only: choose another one.",
    errno.ENOSPC: "The disk is full: free some space or choose another disk, then run the same command again.",
    errno.EDQUOT: "Your quota is used up: free some space or choose another disk, then run the same command again.",
    errno.EIO: "The disk reports an error: look at the system log, and choose another disk.",
    errno.EEXIST: "Something with that name exists already, perhaps a file: choose another path.",
    errno.ENOTDIR: "A part of this path is a file: choose another path.",
    errno.EISDIR: "This is a directory where a file was expected.",
    errno.EAGAIN: "The system can start no more processes or threads: use fewer of them.",
    errno.ENOMEM: "There is not enough memory: use fewer processes, smaller tables or a smaller batch.",
}


def as_user_error(error: BaseException) -> UserError | None:
    """Convert an error that a user or a machine can cause to a UserError; return None for internal errors."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        path = f"{error.filename}: " if error.filename else ""
        return ResourceError(f"{path}{error.strerror}. {_REMEDIES[error.errno]}")
    if isinstance(error, MemoryError) or any(message in str(error) for message in _OUT_OF_MEMORY):
        return ResourceError(f"Out of memory ({error}). {_REMEDIES[errno.ENOMEM]}")
    return None
