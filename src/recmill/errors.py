"""Errors that a user or a machine can cause, one class per exit code. Any other exception is an internal error."""

import errno
import os
import resource
from collections.abc import Iterable
from pathlib import Path

# Messages name flags. Unless the command line sets this, public functions replace these by their arguments.
names_flags = False


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
    bad_row: tuple[int, str] | None = None  # of an error about one row: its place among the rows, the fact


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

_WRONG_PATHS = {
    errno.ENAMETOOLONG: "Choose a shorter path.",
    errno.ELOOP: "A symbolic link in this path leads back to itself: remove it, or choose another path.",
}
_MAX_PATH_SHOWN = 300
_REMEDIES = {
    errno.EACCES: "Choose a directory that you may write to, or change its permissions.",
    errno.EPERM: "Choose a directory that you may write to, or change its permissions.",
    errno.EROFS: "The file system is read-only: choose another one.",
    errno.ENOSPC: "The disk is full: free some space or choose another disk, then run the same command again.",
    errno.EDQUOT: "Your quota is used up: free some space or choose another disk, then run the same command again.",
    errno.EFBIG: "A file may not be that large here: raise the limit (see: ulimit -f), or choose another file system.",
    errno.EMFILE: "Too many files are open: raise the limit (ulimit -n 4096), or use fewer processes.",
    errno.ENFILE: "The system has too many open files: end other programs, or raise fs.file-max.",
    errno.ENOLCK: "The file system has no locks: choose another one.",
    errno.ESTALE: "The file server no longer knows this file: mount it again, then run the same command again.",
    errno.EIO: "The disk reports an error: look at the system log, and choose another disk.",
    errno.EEXIST: "Something with that name exists already, perhaps a file: choose another path.",
    errno.ENOENT: "It was removed meanwhile, or cannot be made there: choose another path.",
    errno.ENOTDIR: "A part of this path is a file: choose another path.",
    errno.EISDIR: "This is a directory where a file was expected.",
    errno.EAGAIN: "No process or thread can be started: raise the limits (ulimit -u, ulimit -v), or use fewer of them.",
    errno.ENOMEM: "There is not enough memory: use fewer processes, smaller tables or a smaller batch.",
}
_UNREADABLE = "You may not read it: change its permissions, or those of the directories above it."
# What libraries raise instead of an OSError or a MemoryError, in lower case.
_MESSAGES = {
    **{os.strerror(number).lower(): remedy for number, remedy in _REMEDIES.items()},
    "can't allocate memory": _REMEDIES[errno.ENOMEM],
    "out of memory": _REMEDIES[errno.ENOMEM],
    "bad_alloc": _REMEDIES[errno.ENOMEM],
    "failed to map segment": _REMEDIES[errno.ENOMEM],  # a shared library, while it is imported
    "can't start new thread": _REMEDIES[errno.EAGAIN],
    "no usable temporary directory": "Free some space there, or set TMPDIR to a directory that you may write to.",
}
_LIMITS = {
    resource.RLIMIT_AS: "address space. Raise the limit (ulimit -v)",
    resource.RLIMIT_DATA: "data. Raise the limit (ulimit -d)",
}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the known name that `name` resembles most, and a space; empty if there is none."""
    near = _nearest(name, known)
    return f"Did you mean '{near}'? " if near else ""


def did_you_mean_path(path: str | Path) -> str:
    """Return the same for a path that does not exist: an existing one that differs in one part."""
    missing, below = Path(path), Path()
    while not missing.parent.is_dir() and missing != missing.parent:
        missing, below = missing.parent, missing.name / below
    try:
        names = [sibling.name for sibling in missing.parent.iterdir() if (sibling / below).exists()]
    except OSError:
        return ""
    stem = missing.name.partition(".")[0]
    near = _nearest(missing.name, (name for name in names if _nearest(stem, [name.partition(".")[0]]) is not None))
    return f"Did you mean '{missing.parent / near / below}'? " if near else ""


def _nearest(name: str, known: Iterable[str]) -> str | None:
    import difflib  # only when something is wrong

    by_lower_case = {text.lower(): text for text in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return by_lower_case[near[0]] if near else None


def remedy_for(error: OSError) -> str:
    """Return what a user can do about this error number; empty if nothing is known."""
    return _REMEDIES.get(error.errno or 0, "")


def _is_unreadable(error: OSError) -> bool:
    """Return whether permission to read is missing; the error is the same if permission to write is missing."""
    if error.errno != errno.EACCES or not isinstance(error.filename, str):
        return False
    if os.path.lexists(error.filename):
        return not os.access(error.filename, os.R_OK)
    return not os.access(Path(error.filename).absolute().parent, os.R_OK | os.X_OK)


def as_user_error(error: BaseException) -> UserError | None:
    """Convert an error that a user or a machine can cause to a UserError; return None for internal errors."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.errno in _WRONG_PATHS:
        return ConfigError(f"{_shortened(error.filename)}{error.strerror}. {_WRONG_PATHS[error.errno]}")
    if isinstance(error, OSError) and error.errno in _REMEDIES and (error.filename or error.errno != errno.ENOENT):
        remedy = _UNREADABLE if _is_unreadable(error) else _REMEDIES[error.errno]
        return ResourceError(f"{_shortened(error.filename)}{error.strerror}. {remedy}")
    text = str(error)
    if isinstance(error, MemoryError):
        return ResourceError(f"Out of memory{f' ({text})' if text else ''}. {_REMEDIES[errno.ENOMEM]}")
    for message, remedy in _MESSAGES.items():
        if message in text.lower():
            return ResourceError(f"{text.strip().rstrip('.')}. {remedy}")
    for which, name in _LIMITS.items():
        limit, _ = resource.getrlimit(which)
        if isinstance(error, SystemError | ImportError) and limit != resource.RLIM_INFINITY:  # imports that ran out
            return ResourceError(f"{type(error).__name__}: {text}, with at most {limit / 1e6:,.0f} MB of {name}.")
    return None


def _shortened(path: object) -> str:
    """Return how a message about `path` begins; a long path is cut. Some errors name no path."""
    if not path:
        return ""
    text = os.fsdecode(path) if isinstance(path, bytes) else str(path)
    return f"{text[:_MAX_PATH_SHOWN]}{'...' if len(text) > _MAX_PATH_SHOWN else ''}: "
