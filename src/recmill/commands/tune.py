"""`recmill tune`: search for better values of config keys, by trials that are judged by their validations alone."""

import json
import logging
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field, PositiveInt

from recmill.commands import assemble
from recmill.commands.history import number
from recmill.commands.keywords import checked_keywords
from recmill.commands.options import Procs, flag, imported
from recmill.config import Config, load_config, to_toml
from recmill.config.load import Overrides, override_texts, read_toml
from recmill.config.options import checked_options, given_path
from recmill.config.problems import validated
from recmill.config.sections import Section
from recmill.errors import ConfigError, UserError, did_you_mean_path
from recmill.files.atomic import write_json, write_text
from recmill.files.locks import exclusive_lock, is_holder_gone
from recmill.launch.processes import variables
from recmill.launch.signals import stop_with_parent
from recmill.observe.printed import counted
from recmill.observe.run_dir import RunDirectory

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_END_SECONDS = 60.0
_SEPARATE_TEST = ["eval.test=false"]  # trials never read the test split


class Options(Section):
    space: str = flag(..., "The keys to vary: a TOML file. See docs/tuning.md.")
    output: str = flag(..., "Directory of the study; repeat the command to resume it, or to add trials.")
    trials: PositiveInt = flag(20, "How many trials the study has in the end.")
    jobs: PositiveInt = flag(1, "Trials at the same time.")
    procs: Procs = 1
    overrides: list[str] = flag([], "Change a config key in all trials.", "--set", metavar="KEY=VALUE")
    prune: bool = flag(True, "Stop trials that are worse than the median of the others.", "--prune/--no-prune")
    seed: int = flag(1, "Seed of the choices.")


class Parameter(Section):
    """What a key may be: a number between two others, or one of several values."""

    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = None
    log: bool = False
    choices: list[Any] = Field(default_factory=list)

    def problem(self) -> str:
        if self.choices:
            only = self.low is None and self.high is None and self.step is None and not self.log
            return "" if only else "give either choices, or low and high"
        if self.low is None or self.high is None:
            return "give low and high, or choices"
        if not self.low < self.high:
            return f"low = {self.low} is not below high = {self.high}"
        if self.log and (self.low <= 0 or self.step is not None):
            return "log = true needs a low above 0, and no step"
        if self.step is not None and not 0 < self.step <= self.high - self.low:
            return f"step = {self.step} is not between 0 and high - low = {self.high - self.low}"
        return ""

    def examples(self) -> list[Any]:
        return self.choices or [self.low, self.high]

    def distribution(self) -> Any:
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution([json.dumps(choice) for choice in self.choices])
        assert self.low is not None and self.high is not None
        if isinstance(self.low, int) and isinstance(self.high, int) and not isinstance(self.step, float):
            return distributions.IntDistribution(self.low, self.high, self.log, self.step or 1)
        return distributions.FloatDistribution(self.low, self.high, self.log, self.step)

    def value(self, drawn: Any) -> Any:
        return json.loads(drawn) if self.choices else drawn


@checked_keywords
def tune(
    config: str | Path | Mapping[str, Any],
    space: str | Path,
    output: str | Path,
    *,
    trials: int = 20,
    jobs: int = 1,
    procs: int = 1,
    overrides: Overrides = (),
    prune: bool = True,
    seed: int = 1,
) -> dict[str, Any]:
    """Train `trials` runs with values drawn from `space`, and write the config of the best one to `output`/best.toml.

    Returns {"trials": [{"number", "state", "value", "values", "run", "reason"}, ...], "best": its number, "config":
    the file, "next": the command to run next}.
    Trials are compared by the headline metric of their best validation, and never read the test split. A study that was
    interrupted resumes. The trials are run directories in `output`/trials.
    """
    given = {"space": str(space), "output": str(output), "trials": trials, "jobs": jobs, "procs": procs}
    given |= {"overrides": override_texts(overrides), "prune": prune, "seed": seed}
    options = checked_options("tune", Options, given)
    optuna = _optuna()
    base = load_config(config, options.overrides)
    _check_trial(base)
    parameters = _read_space(given_path(options.space, "--space"), base)
    directory = given_path(options.output, "--output").absolute()
    directory.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(directory / "lock", "Wait for that `recmill tune` to end, or choose another --output."):
        _check_same_study(directory, base, options.space)
        study = optuna.create_study(
            storage=f"sqlite:///{directory / 'study.db'}",
            study_name="recmill",
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner() if options.prune else optuna.pruners.NopPruner(),
        )
        # Its first draws depend on the seed alone: with the same one, trials that are added would repeat earlier ones.
        study.sampler = optuna.samplers.TPESampler(seed=options.seed + len(study.get_trials(deepcopy=False)))
        _Study(optuna, study, parameters, directory, options).run()
        return _report(study, parameters, base, directory)


def _optuna() -> Any:
    optuna = imported("optuna", "`recmill tune` needs optuna", "tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _read_space(path: Path, base: Config) -> dict[str, Parameter]:
    """Read and check a space: the config must be valid with both ends of each range, and with each choice."""
    found: dict[str, Parameter] = {}
    problems = []
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. {did_you_mean_path(path)}--space is a TOML file of the keys to vary.")
    for key, values in _flat(read_toml(path)):
        try:
            if not isinstance(values, dict):
                raise ConfigError(f"give a table like {{low = 0.001, high = 0.1, log = true}}, not {values!r}")
            found[key], wrong = validated(Parameter, values, prefix=f"{key}.")
            problems += [f"  {problem.text}" for problem in wrong]
            if problem := "" if wrong else found[key].problem():
                raise ConfigError(problem)
            for example in [] if wrong else found[key].examples():
                _check_trial(load_config(_given(base), override_texts({key: example})))
            if key == "eval.test":
                raise ConfigError("trials never read the test split. Remove it.")
        except UserError as error:
            text, named = str(error).replace("--set: ", ""), f"'{key}'"  # the user gave no --set
            problems.append(f"  {text}" if named in text else f"  {named}: {text}")
    if problems:
        raise ConfigError(f"{path}: {counted(len(problems), 'problem')} in the space:\n" + "\n".join(problems))
    if not found:
        raise ConfigError(
            f'{path}: no keys. Give some, like "optim.dense.lr" = {{low = 0.001, high = 0.1, log = true}}.'
        )
    return found


def _check_trial(config: Config) -> None:
    """Raise an error if a config does not fit its dataset, or trains on the rows by which trials are compared."""
    if config.settings.data.train_on_validation:
        fact = "trials are compared by their validation, so they must not train on it"
        raise ConfigError(f"data.train_on_validation: {fact}. Remove it.")
    assemble.open_matching_dataset(config)


def _given(base: Config) -> dict[str, Any]:
    """Return the config without keys of the model that were not given: some defaults follow other keys."""
    values = base.as_dict()
    given = {name: value for name, value in values["model"].items() if name in {"name", *base.model.model_fields_set}}
    return values | {"model": given}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a space, whether they are quoted or nested."""
    for name, value in values.items():
        if isinstance(value, dict) and value and all(isinstance(inner, dict) for inner in value.values()):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check_same_study(directory: Path, base: Config, space: str) -> None:
    """Write what the study searches, or raise if it has begun with something else."""
    file = directory / "study.json"
    origin = {"config": base.as_dict(), "space": read_toml(Path(space))}
    if not file.is_file():
        if left := next((path.name for path in directory.iterdir() if path.name != "lock"), ""):
            raise ConfigError(f"{directory} holds {left}, and is no study. Choose another --output.")
        write_text(directory / "config.toml", tomli_w.dumps(_given(base)))
        write_json(file, origin)
    elif json.loads(file.read_bytes()) != json.loads(json.dumps(origin)):
        raise ConfigError(f"{directory} is a study of another config or space. Choose another --output.")


@dataclass
class _Running:
    trial: Any
    run: RunDirectory
    process: "subprocess.Popen[bytes]"
    reported: set[int] = field(default_factory=set)


class _Study:
    """Trials in processes of their own. What was running when the last command ended is resumed."""

    def __init__(
        self, optuna: Any, study: Any, parameters: dict[str, Parameter], directory: Path, options: Options
    ) -> None:
        self._optuna, self._study, self._parameters = optuna, study, parameters
        self._directory, self._options = directory, options
        self._running: list[_Running] = []

    def run(self) -> None:
        states = self._optuna.trial.TrialState
        interrupted = self._study.get_trials(states=[states.RUNNING])
        waiting = [self._optuna.trial.Trial(self._study, trial._trial_id) for trial in interrupted]
        missing = self._options.trials - len(self._study.get_trials(deepcopy=False))
        try:
            while self._running or waiting or missing > 0:
                while len(self._running) < self._options.jobs and (waiting or missing > 0):
                    missing -= not waiting
                    self._start(waiting.pop() if waiting else self._study.ask(self._distributions()))
                time.sleep(_POLL_SECONDS)
                self._running = [job for job in self._running if not self._has_ended(job)]
        finally:
            for job in self._running:
                job.process.terminate()  # it saves, and is resumed later
            for job in self._running:
                job.process.wait()

    def _distributions(self) -> dict[str, Any]:
        return {key: parameter.distribution() for key, parameter in self._parameters.items()}

    def _start(self, trial: Any) -> None:
        run = self._directory / "trials" / f"{trial.number:04d}"
        run.parent.mkdir(exist_ok=True)
        _wait_for_end(run / ".lock")
        values = _values(trial.params, self._parameters)
        words = ["train", str(self._directory / "config.toml"), "--run", str(run), "--procs", str(self._options.procs)]
        for text in [*override_texts(values), *_SEPARATE_TEST]:
            words += ["--set", text]
        log.info("trial %d: %s", trial.number, ", ".join(f"{key}={_short(value)}" for key, value in values.items()))
        with _output(run).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "recmill", *words, "--no-verify"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=variables(self._options.jobs * self._options.procs, is_alone=True),
                preexec_fn=stop_with_parent,
            )
        known = set(self._study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        self._running.append(_Running(trial, RunDirectory(run), process, known))

    def _has_ended(self, job: _Running) -> bool:
        """Report new validations to the study; end the trial if it is hopeless, and note how it ended."""
        states = self._optuna.trial.TrialState
        code = job.process.poll()  # first, so that all validations of a trial that has ended are read
        validations = _validations(job.run)
        for index, value in enumerate(validations):
            if index not in job.reported:
                job.trial.report(value, index)
                job.reported.add(index)
        if code is None:
            if not validations or not job.trial.should_prune():
                return False
            job.process.terminate()
            job.process.wait()
            reason = f"stopped after {counted(len(validations), 'validation')}"
            job.trial.set_user_attr("reason", reason)
            self._study.tell(job.trial, state=states.PRUNED)
            log.info("trial %d %s: %.4f is below the median", job.trial.number, reason, max(validations))
        elif code == 0 and validations:
            self._study.tell(job.trial, max(validations))
            best = self._study.best_trial
            reached = f"trial {job.trial.number} reached {max(validations):.4f}"
            log.info("%s; best: %.4f of trial %d", reached, best.value, best.number)
        else:
            reason = str(job.run.read_status().get("reason") or _last_line(_output(job.run.path)))
            job.trial.set_user_attr("reason", reason)
            self._study.tell(job.trial, state=states.FAIL)
            log.warning("trial %d failed: %s", job.trial.number, reason)
        return True


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _values(params: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    return {key: parameters[key].value(drawn) for key, drawn in params.items()}


def _validations(run: RunDirectory) -> list[float]:
    """Return the headline metric of each validation so far."""
    if not run.metrics_file.is_file():
        return []
    lines = [line for line in run.read_metrics() if line.get("split") == "val"]
    found = (number(line.get(str(line.get("headline")))) for line in lines)
    return [float(value) for value in found if value is not None]


def _wait_for_end(lock: Path) -> None:
    """Wait until the process of a trial has ended, which saves when its `recmill tune` was killed."""
    deadline = time.monotonic() + _END_SECONDS
    while lock.is_file() and lock.read_text() and not is_holder_gone(lock) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _output(run: Path) -> Path:
    """Return the file of what a trial prints: beside its run directory."""
    return run.with_suffix(".txt")


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def _report(study: Any, parameters: Mapping[str, Parameter], base: Config, directory: Path) -> dict[str, Any]:
    trials = [
        {
            "number": trial.number,
            "state": trial.state.name.lower(),
            "value": trial.value,
            "values": _values(trial.params, parameters),
            "run": str(directory / "trials" / f"{trial.number:04d}"),
            "reason": trial.user_attrs.get("reason", ""),
        }
        for trial in study.get_trials(deepcopy=False)
    ]
    complete = [trial for trial in trials if trial["state"] == "complete"]
    if not complete:
        return {"trials": trials, "best": None, "config": None, "next": None}
    best = max(complete, key=lambda trial: trial["value"])
    file = directory / "best.toml"
    write_text(file, to_toml(load_config(_given(base), override_texts(best["values"]))))
    following = shlex.join(["recmill", "train", str(file), "--run", str(directory / "best")])
    return {"trials": trials, "best": best["number"], "config": str(file), "next": following}
