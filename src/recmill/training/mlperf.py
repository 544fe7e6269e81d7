"""MLPerf's log of a run, which `mlperf_logging.compliance_checker` reads: DLRM-DCNv2, training rules 6.0.0."""

import json
from pathlib import Path
from typing import Any

from torchrec.optim.keyed import CombinedOptimizer

from recmill.config.sections import Settings
from recmill.files.atomic import write_text
from recmill.observe.recorder import unix_ns
from recmill.training.schedule import RunSteps

_TOKEN = ":::MLLOG "


class MlperfLog:
    """The log of one run, replaced as a whole after each validation; a resumed run continues it.

    The training before a validation is logged as an epoch: numbers of epochs are fractions.
    """

    def __init__(self, path: Path, steps_per_epoch: int) -> None:
        self._path = path
        self._steps_per_epoch = steps_per_epoch
        self._events: list[dict[str, Any]] = []

    def begin(self, started_ns: int, facts: dict[str, Any]) -> None:
        """Start a new log: initialization began at `started_ns` and ends now."""
        self._add("cache_clear", unix_ns(), value=False)
        self._add("init_start", started_ns)
        for key, value in facts.items():
            self._add(key, unix_ns(), value=value)
        self._add("init_stop", unix_ns())
        self._add("run_start", unix_ns(), step=0)
        self._write()

    def resume(self, step: int) -> None:
        """Forget what was logged after `step`. MLPerf knows no restarts, so run_start says where they were."""
        lines = self._path.read_text(encoding="utf-8").splitlines()
        self._events = [json.loads(line.removeprefix(_TOKEN)) for line in lines]
        self._forget_after(step)
        (start,) = (event for event in self._events if event["key"] == "run_start")
        start["metadata"].setdefault("resumed_at_steps", []).append(step)
        self._write()

    def validated(self, step: int, started_ns: int, auroc: float | None) -> None:
        """Log a validation that has ended, and the training before it; replace an earlier one of the same step."""
        self._forget_after(step - 1)
        before = self._events[-1]
        self._add("epoch_start", before["time_ms"] * 10**6, step=before["metadata"]["step"])
        self._add("epoch_stop", started_ns, step=step)
        self._add("eval_start", started_ns, step=step)
        self._add("eval_accuracy", unix_ns(), value=auroc, step=step)
        self._add("eval_stop", unix_ns(), step=step)
        self._write()

    def stop(self, step: int, status: str) -> None:
        self._add("run_stop", unix_ns(), step=step, status=status)
        self._write()

    def _forget_after(self, step: int) -> None:
        """Remove what follows the last validation up to `step`, or the start of the run."""
        ends = [
            number
            for number, event in enumerate(self._events)
            if event["key"] == "run_start" or (event["key"] == "eval_stop" and event["metadata"]["step"] <= step)
        ]
        del self._events[ends[-1] + 1 :]

    def _add(self, key: str, at_ns: int, value: Any = None, step: int | None = None, **metadata: Any) -> None:
        if step is not None:
            metadata |= {"epoch_num": step / self._steps_per_epoch, "step": step}
        kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
        self._events.append(
            {
                "namespace": "",
                "time_ms": at_ns // 10**6,
                "event_type": kinds.get(key.rpartition("_")[2], "POINT_IN_TIME"),
                "key": key,
                "value": value,
                "metadata": metadata,
            }
        )

    def _write(self) -> None:
        write_text(self._path, "".join(f"{_TOKEN}{json.dumps(event)}\n" for event in self._events))


def mlperf_facts(settings: Settings, steps: RunSteps, optimizer: CombinedOptimizer) -> dict[str, Any]:
    """Return the settings that MLPerf's rules require in the log."""
    dense, tables = settings.optim.dense, settings.optim.tables
    used = dict(optimizer.optimizers)["dense"].param_groups[0]
    return {
        "submission_benchmark": "dlrm_dcnv2",
        "submission_org": settings.observe.mlperf_org,
        "submission_division": settings.observe.mlperf_division,
        "submission_status": "onprem",
        "seed": settings.train.seed,
        "global_batch_size": settings.train.global_batch_size,
        "gradient_accumulation_steps": 1,
        "opt_name": _one_or_both(dense.name, tables.name),
        "opt_base_learning_rate": _one_or_both(dense.lr, tables.lr),
        "opt_weight_decay": _one_or_both(dense.weight_decay, tables.weight_decay),
        "opt_adagrad_epsilon": _one_or_both(used.get("eps"), tables.eps),
        "opt_adagrad_learning_rate_decay": used.get("lr_decay", 0),
        "opt_adagrad_initial_accumulator_value": used.get("initial_accumulator_value", 0),
        "opt_learning_rate_warmup_steps": steps.warmup,
        "opt_learning_rate_decay_start_step": steps.decay_start,
        "opt_learning_rate_decay_steps": steps.decay or steps.step_size,
    }


def _one_or_both(dense: Any, tables: Any) -> Any:
    """MLPerf has one optimizer; where ours differ, both are logged, and the rules of the closed division fail."""
    return dense if dense == tables else {"dense": dense, "tables": tables}
