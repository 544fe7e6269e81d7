"""Where a run is trained: launcher, machines, processes and the settings of a site, from a profile and flags."""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from recmill import registry
from recmill.config import Section
from recmill.config.problems import contradictions_within, validated
from recmill.config.sections import key
from recmill.config.shipped import shipped_configs
from recmill.errors import ConfigError

Launcher = Literal["local", "torchrun", "torchx", "mpi", "slurm", "pbs", "kubernetes"]
LAUNCHERS = ("local", "torchrun", "torchx", "mpi", "slurm", "pbs", "kubernetes")
_SHELL = {"local", "torchrun", "torchx", "mpi", "slurm", "pbs"}
# Which launchers use a key. For the others it is an error, not ignored.
_READ_BY = {
    "cpus": {"torchx", "mpi", "slurm", "pbs", "kubernetes"},
    "memory_gb": {"torchx", "slurm", "pbs", "kubernetes"},
    "gpus": {"torchx", "slurm", "kubernetes"},
    "account": {"slurm", "pbs"},
    "queue": {"slurm", "pbs", "kubernetes", "torchx"},
    "setup": _SHELL,
    "after": _SHELL,
    "env": set(LAUNCHERS) - {"torchx"},
    "directives": {"slurm", "pbs"},
    "chunk": {"pbs"},
    "mpi": {"mpi", "pbs"},
    "mpi_options": {"mpi", "pbs"},
    "hosts": {"local", "torchrun", "mpi"},
    "chain": {"pbs"},
    "scheduler": {"torchx"},
    "kind": {"kubernetes"},
    "image": {"kubernetes", "torchx"},
    "mounts": {"kubernetes", "torchx"},
    "namespace": {"kubernetes", "torchx"},
}
_WORD = re.compile(r"[A-Za-z0-9_.:@+=,/\[\]-]{1,128}")
_ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASS|COOKIE|CRED|AUTH|SESSION", re.I)
_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x80-\x9f\u2028\u2029\ud800-\udfff]")


class Place(Section):
    """The keys of a profile. Lines of `setup` and `after` are shell code; other values are validated or quoted."""

    launcher: Launcher = key(..., "Launcher: " + ", ".join(LAUNCHERS) + ".")
    nodes: PositiveInt = key(1, "Number of machines.")
    procs: PositiveInt = key(1, "Processes per machine; one per GPU.")
    cpus: PositiveInt | None = key(None, "Cores per process.")
    memory_gb: PositiveInt | None = key(None, "Memory per machine, in GB.")
    gpus: NonNegativeInt = key(0, "GPUs per machine.")
    device: str | None = key(None, "What a process computes with, as for `recmill plan --device`: checked before.")
    time: str | None = key(None, "Time limit: HH:MM:SS or D-HH:MM:SS.")
    warning_seconds: PositiveInt = key(120, "How long before the time limit a run saves and ends.")
    account: str | None = key(None, "Account or project that is charged.")
    queue: str | None = key(None, "Partition (Slurm), queue (PBS), Kueue's queue (Kubernetes) or Volcano's (torchx).")
    python: str | None = key(None, "Interpreter that has Recmill.")
    setup: list[str] = key([], "Shell lines that run first, like 'module load conda'.")
    after: list[str] = key([], "Shell lines that run after training, however it ended.")
    env: dict[str, str] = key({}, "Environment variables of the processes; no secrets.")
    directives: list[str] = key([], "Further #SBATCH or #PBS lines, like '--qos=debug'.")
    chunk: str | None = key(None, "What follows select=N: in PBS, like 'system=polaris'.")
    mpi: Literal["openmpi", "mpich", "pals"] = key("mpich", "Implementation of mpiexec.")
    mpi_options: list[str] = key([], "Further options of mpiexec.")
    hosts: list[str] = key([], "Names or addresses of the machines, without a scheduler.")
    chain: PositiveInt = key(1, "Number of jobs to queue; each resumes the run where the previous one stopped (PBS).")
    scheduler: str = key("local_cwd", "Scheduler of torchx.")
    kind: Literal["job", "jobset", "trainjob"] = key("job", "What to create in Kubernetes.")
    image: str | None = key(None, "Container image.")
    mounts: list[str] = key([], "Volumes with data and runs, as CLAIM:/path.")
    namespace: str | None = key(None, "Kubernetes namespace.")

    @property
    def size(self) -> int:
        return self.nodes * self.procs

    @property
    def starts_on_each_node(self) -> bool:
        """Whether the user has to start the script on each node: nothing in it reaches the others."""
        return self.launcher in ("local", "torchrun") and self.nodes > 1

    @property
    def seconds(self) -> int | None:
        """Return the time limit in seconds."""
        if self.time is None:
            return None
        match = _TIME.fullmatch(self.time)
        assert match is not None  # checked
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    def contradictions(self) -> list[str]:
        found = [
            f"'{name}' is not read by launcher '{self.launcher}', only by {' and '.join(sorted(readers))}. Remove it."
            for name, readers in _READ_BY.items()
            if name in self.changed_keys() and self.launcher not in readers
        ]
        return [*found, *self._unsafe_values(), *self._missing_values()]

    def _unsafe_values(self) -> list[str]:
        words = {name: getattr(self, name) for name in ("account", "queue", "chunk", "scheduler", "image", "namespace")}
        words |= {f"{name}[{i}]": word for name in ("hosts", "mounts") for i, word in enumerate(getattr(self, name))}
        found = [
            f"'{name}': {word!r} may contain only letters, digits and _.:@+=,/[]-, and may not begin with '-'."
            for name, word in words.items()
            if word is not None and not (_WORD.fullmatch(word) and not word.startswith("-"))
        ]
        texts = {f"env.{name}": value for name, value in self.env.items()} | {"python": self.python or ""}
        texts |= {
            f"{n}[{i}]": t
            for n in ("setup", "after", "directives", "mpi_options")
            for i, t in enumerate(getattr(self, n))
        }
        found += [
            f"'{name}' contains a control character. Remove it."
            for name, text in texts.items()
            if _CONTROL.search(text)
        ]
        for name, value in self.env.items():
            if not _ENVIRONMENT_NAME.fullmatch(name):
                found.append(f"'env': {name!r} is not the name of an environment variable.")
            if _SECRET.search(name) or re.search("://[^/]*:[^/]*@", value):
                found.append(
                    f"'env.{name}' looks like a secret, and scripts are kept in the run directory. Set it in the "
                    "environment of the nodes, or in a Kubernetes Secret."
                )
        return found

    def _missing_values(self) -> list[str]:
        found = []
        if self.time is not None and not _TIME.fullmatch(self.time):
            found.append(f"'time': {self.time!r} is not a time like 02:00:00 or 1-12:00:00.")
        elif self.seconds is not None and self.seconds <= self.warning_seconds:
            found.append(f"'time': {self.time} must be longer than warning_seconds = {self.warning_seconds}.")
        if self.launcher in ("local", "torchrun", "mpi") and self.nodes > 1 and len(self.hosts) != self.nodes:
            found.append(
                f"'hosts': the profile lists {len(self.hosts)} hosts for {self.nodes} nodes. List one per node."
            )
        is_torchx = self.launcher == "torchx" and self.scheduler == "kubernetes"
        if is_torchx and not self.queue:
            found.append("'queue': torchx on Kubernetes needs a Volcano queue.")
        if (is_torchx or self.launcher == "kubernetes") and not (self.image and self.mounts):
            found.append(
                "'image' and 'mounts': Kubernetes needs an image that has Recmill, and a volume with data and runs."
            )
        found += [f"'mounts': {mount!r} is not of the form CLAIM:/path." for mount in self.mounts if ":/" not in mount]
        return found


def check_text(what: str, text: str) -> str:
    """Return the text, or raise ConfigError if it cannot be written to a script."""
    if _CONTROL.search(text):
        raise ConfigError(f"{what} {text!r} contains a control character or is not valid UTF-8. Choose another one.")
    return text


def read_place(on: str, flags: dict[str, Any], profiles: Path) -> Place:
    """Return the place that `on` names: a launcher, or a profile, found by path or name. Flags override its keys."""
    values: dict[str, Any] = {"launcher": on}
    shipped = {file.stem: file for name, file in shipped_configs().items() if name.startswith("clusters/")}
    path = Path(on) if on.endswith(".toml") else profiles / f"{on}.toml"
    if not path.exists():
        path = shipped.get(on.removeprefix("clusters/"), path)
    if on not in LAUNCHERS:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, IsADirectoryError):
            known = {*LAUNCHERS, *shipped, *(file.stem for file in profiles.glob("*.toml"))}
            message = registry.unknown("launcher or profile", on, known)
            raise ConfigError(f"--on: {message} A profile may also be named by its path (.toml).") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}.") from None
    place, problems = validated(Place, values | flags)
    sentences = [problem.text for problem in problems] or list(contradictions_within(place))
    if sentences:
        where = str(path) if on not in LAUNCHERS else f"--on {on}"
        raise ConfigError("\n".join(f"{where}: {sentence}" for sentence in sentences))
    return place
