"""The sections of a run config. The model's own section is the `Config` in its file under `models/`."""

import math
import re
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

T = TypeVar("T")
MAY_CHANGE = "may change on resume"
_MAX_SECONDS = 1e8  # three years
MayChange = Annotated[T, MAY_CHANGE]  # a key or section that may change when a run is resumed

SSD_ON_CUDA = (
    "it would need FBGEMM's SSD operators, which no published FBGEMM has (pytorch/FBGEMM#5666). "
    "Use 'cached_host_mem', or train on CPU."
)
DYNAMIC_ON_CUDA = "ids are looked up in host memory. Train on CPU."


TO_THE_END = "to the end"
_SHARE = re.compile(r"\d{1,9}(\.\d{1,9})?%", re.ASCII)


def _checked_steps(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    if isinstance(value, str) and _SHARE.fullmatch(value) and 0 < Fraction(value[:-1]) <= 100:
        return value
    raise PydanticCustomError("steps", "should be a whole number, or a share of the run like '10%'")


# No fractions like 0.1: 1.0 would be the complete run, and 1 a step.
Steps = Annotated[int | str, BeforeValidator(_checked_steps)]
DecaySteps = Annotated[
    int | str, BeforeValidator(lambda value: value if value == TO_THE_END else _checked_steps(value))
]


def number_of_steps(value: int | str, total: int) -> int:
    """Return the steps of a `Steps` value in a run of `total` steps. Shares are rounded up."""
    return math.ceil(Fraction(value[:-1]) * total / 100) if isinstance(value, str) else value


def key(default: Any, help: str, **constraints: Any) -> Any:
    """Declare a key with its default (... if it is required), its one-line help, and pydantic's constraints."""
    return Field(default, description=help, **constraints)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def contradictions(self) -> list[str]:
        """Return a sentence for each set of keys that contradict each other.

        It names these keys in full, like train.seed: it is not reported if one of them has a problem of its own.
        """
        return []

    def changed_keys(self) -> list[str]:
        """Return the keys whose values are not their defaults, as declared."""
        fields = type(self).model_fields
        return [key for key in fields if getattr(self, key) != fields[key].default]


def subsection(field: FieldInfo) -> type[Section] | None:
    """Return the class of a field that is a section, and None for a key."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def named_sections(field: FieldInfo) -> type[Section] | None:
    """Return the class of the sections in a field that holds sections by name."""
    arguments = get_args(field.annotation) if get_origin(field.annotation) is dict else ()
    is_section = bool(arguments) and isinstance(arguments[1], type) and issubclass(arguments[1], Section)
    return arguments[1] if is_section else None


class MultiHotSection(Section):
    sizes: list[PositiveInt] = key(
        [], "Ids per row by feature, or one number for all; fixed ids are added to a row's own. Empty: off."
    )
    distribution: Literal["uniform", "pareto"] = key("uniform", "Distribution of the added ids.")
    min_table_size: NonNegativeInt = key(0, "Features whose tables have fewer rows keep one id per row.")
    seed: NonNegativeInt = key(0, "Seed of the added ids; 0 gives those of the DLRM reference.", lt=2**32)
    collect_frequencies: MayChange[bool] = key(False, "Write how often each id was trained on to frequencies.npz.")

    def ids_per_row(self, table_rows: list[int]) -> list[int]:
        """Return the number of ids per row of each feature, given the rows of its table."""
        sizes = self.sizes * len(table_rows) if len(self.sizes) == 1 else self.sizes
        return [s if rows >= self.min_table_size else 1 for s, rows in zip(sizes, table_rows, strict=True)]

    def contradictions(self) -> list[str]:
        ignored = [] if self.sizes else self.changed_keys()
        return [f"data.multi_hot.{key} without data.multi_hot.sizes does nothing. Set both." for key in ignored]


class DataSection(Section):
    path: MayChange[str] = key(
        ..., "Directory of the prepared dataset, relative to the current directory.", min_length=1
    )
    order: Literal["shuffled", "file", "batch"] = key(
        "shuffled", "Training order: a new permutation each epoch, as stored, or as stored but shuffled in each batch."
    )
    drop_last: bool = key(False, "Drop the last global batch of an epoch if it is not full.")
    remainder: Literal["even", "torchrec"] = key(
        "even", "How the last rows of an epoch are divided: evenly, or as TorchRec's Criteo reader does."
    )
    limit_train_batches: NonNegativeInt = key(0, "Train on N global batches per epoch; 0: all.")
    limit_val_batches: MayChange[NonNegativeInt] = key(0, "Validate on the first N global batches; 0: all.")
    limit_test_batches: MayChange[NonNegativeInt] = key(0, "Test on the first N global batches; 0: all.")
    prefetch: MayChange[NonNegativeInt] = key(2, "Batches to prepare ahead in the background; 0: none.", le=64)
    train_on_validation: bool = key(False, "Histories: train on validation items too, as BERT4Rec's own code does.")
    multi_hot: MultiHotSection = MultiHotSection()


Store = Literal["device_mem", "cached_host_mem", "cached_ssd"]


class DynamicTable(Section):
    max_rows: MayChange[PositiveInt] = key(..., "Ids that may have a row at a time, over all processes.", lt=2**31)
    min_count: PositiveInt = key(1, "An id gets a row when it has occurred this often.", lt=2**32)
    admit_probability: float = key(1.0, "Or: with this probability in each batch in which it occurs.", gt=0.0, le=1.0)
    expire_after_steps: NonNegativeInt = key(
        0, "Forget an id that did not occur for this many steps; 0: never.", lt=2**62
    )
    init_rows: NonNegativeInt = key(
        0, "Rows start as in a table of this size; 0: as in one for all ids, but of at most 2^20 rows."
    )


ALL_TABLES = "all"


class TablesSection(Section):
    store: MayChange[Store] = key(
        "device_mem", "Where table rows live: in the device's memory, or in host memory or a file behind a cache."
    )
    cache_memory_budget_mb: MayChange[NonNegativeInt] = key(
        0, "Memory of each process for cached tables, in MiB: of its GPU (cached_host_mem) or host (cached_ssd)."
    )
    path: MayChange[str] = key("", "Directory on a local SSD for the rows of cached_ssd; empty: the run directory.")
    disk_budget_gb: MayChange[float] = key(
        0.0, "Maximum disk space of cached_ssd for each process, in GiB; 0: no limit.", ge=0.0
    )
    lookahead: MayChange[Literal["auto"] | NonNegativeInt] = key(
        "auto", "Coming batches whose rows cached_ssd loads and keeps; 'auto': as many as fit; 0: off."
    )
    stores: MayChange[dict[str, Store]] = key({}, "Stores of single tables, by table or feature name.")
    dynamic: dict[str, DynamicTable] = key(
        {}, "Tables whose ids are not known in advance, by table or feature name, or 'all': see docs/stores.md."
    )

    def dynamic_of(self, *names: str) -> DynamicTable | None:
        """Return the rules of a table that has these names; None if its ids are numbers of rows."""
        return next((self.dynamic[name] for name in (*names, ALL_TABLES) if name in self.dynamic), None)

    def store_of(self, *names: str) -> Store:
        """Return the store of a table, given its name and its features."""
        return next((self.stores[name] for name in names if name in self.stores), self.store)

    def requested_stores(self) -> dict[str, Store]:
        """Return the stores by the config key that requests them."""
        return {"tables.store": self.store, **{f"tables.stores.{name}": store for name, store in self.stores.items()}}

    def contradictions(self) -> list[str]:
        requested = self.requested_stores()
        problems = []
        cached = [key for key, store in requested.items() if store == "cached_ssd"]
        if cached and not self.cache_memory_budget_mb:
            problems.append(
                f"{cached[0]} = 'cached_ssd' needs tables.cache_memory_budget_mb, the memory for its cache. Set it."
            )
        if set(requested.values()) == {"device_mem"} and self.cache_memory_budget_mb:
            problems.append("tables.cache_memory_budget_mb has no meaning for tables.store = 'device_mem'. Remove it.")
        if not cached:
            problems += [
                f"tables.{key} has no meaning without a table in 'cached_ssd'. Remove it."
                for key in ("path", "disk_budget_gb", "lookahead")
                if key in self.changed_keys()
            ]
        problems += [
            f"tables.dynamic.{name}.min_count with tables.dynamic.{name}.admit_probability: ids are admitted by one of "
            "them. Remove the other."
            for name, rules in self.dynamic.items()
            if rules.min_count > 1 and rules.admit_probability < 1
        ]
        if cached and self.dynamic and set(requested.values()) != {"cached_ssd"}:
            problems.append(
                "tables.dynamic with tables.stores: dynamic tables beside tables of another store are not supported. "
                "Use one tables.store for all."
            )
        return problems


ShardingType = Literal["auto", "data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid"]
ExchangePrecision = Literal["fp32", "fp16", "bf16"]


class ShardingSection(Section):
    mode: Literal["auto", "ddp"] = key("auto", "'ddp': plain data parallelism, with every table on every process.")
    default: ShardingType = key("auto", "How tables are sharded; 'auto' leaves it to TorchRec's planner.")
    tables: dict[str, ShardingType] = key({}, "How single tables are sharded, by table or feature name.")
    forward_precision: MayChange[ExchangePrecision] = key(
        "fp32", "How looked-up rows are sent between processes; they are stored and trained in float32."
    )
    backward_precision: MayChange[ExchangePrecision] = key("fp32", "How the gradients of looked-up rows are sent.")

    def type_of(self, *names: str) -> ShardingType:
        """Return how a table is sharded, given its name and its features."""
        if self.mode == "ddp":
            return "data_parallel"
        return next((self.tables[name] for name in names if name in self.tables), self.default)

    def requested_types(self) -> dict[str, ShardingType]:
        """Return the types by the config key that requests them."""
        if self.mode == "ddp":
            return {"sharding.mode": "data_parallel"}
        of_tables = {f"sharding.tables.{name}": kind for name, kind in self.tables.items()}
        return {"sharding.default": self.default, **of_tables}

    def contradictions(self) -> list[str]:
        problems = []
        if self.mode == "ddp" and (self.default != "auto" or self.tables):
            problems.append(
                "sharding.mode = 'ddp' keeps every table on every process, but sharding.default or sharding.tables "
                "request something else. Remove them, or the mode."
            )
        if set(self.requested_types().values()) == {"data_parallel"}:
            problems += [
                f"sharding.{key} = '{getattr(self, key)}', but every process has all tables: no rows are sent. Remove "
                "it, or shard tables."
                for key in ("forward_precision", "backward_precision")
                if getattr(self, key) != "fp32"
            ]
        return problems


_MAX_FLOAT32 = 3e38  # more is no number in a kernel


class DenseOptim(Section):
    name: Literal["adam", "adamw", "adagrad", "sgd"] = key("adam", "Optimizer of all dense layers.")
    lr: PositiveFloat = key(0.001, "Learning rate of the dense layers.", le=_MAX_FLOAT32)
    weight_decay: float = key(0.0, "Weight decay of the dense layers.", ge=0.0)
    eps: float = key(
        0.0, "Added to the denominator; 0: PyTorch's default (Adam 1e-8, Adagrad 1e-10). Not for SGD.", ge=0.0
    )
    clip_grad_norm: float = key(0.0, "Clip the norm of all dense gradients together; 0: no limit.", ge=0.0)

    def contradictions(self) -> list[str]:
        if self.eps and self.name == "sgd":
            return ["optim.dense.eps has no meaning for optim.dense.name = 'sgd'. Remove it."]
        return []


class TablesOptim(Section):
    name: Literal["rowwise_adagrad", "adagrad", "sgd", "adam", "ftrl"] = key(
        "rowwise_adagrad", "Optimizer of the tables; 'adam' and 'ftrl' keep two state values per weight."
    )
    lr: PositiveFloat = key(0.05, "Learning rate of the tables.", le=_MAX_FLOAT32)
    eps: PositiveFloat = key(1e-8, "Added to the denominator (Adagrad, Adam).", le=_MAX_FLOAT32)
    weight_decay: float = key(0.0, "Decoupled weight decay of the rows that a batch looks up.", ge=0.0, le=_MAX_FLOAT32)
    l2: float = key(
        0.0,
        "L2 regularization: l2 / 2 * |row|^2 joins the loss for each row that a batch looks up.",
        ge=0.0,
        le=_MAX_FLOAT32,
    )
    lambda1: float = key(0.0, "L1 regularization (ftrl).", ge=0.0, le=_MAX_FLOAT32)
    lambda2: float = key(0.0, "L2 regularization (ftrl).", ge=0.0, le=_MAX_FLOAT32)
    beta: float = key(0.0, "Added to the root of the sum of squares (ftrl).", ge=0.0, le=_MAX_FLOAT32)
    initial_accumulator: PositiveFloat = key(0.1, "Initial value of the sum of squares (ftrl).", le=_MAX_FLOAT32)

    def contradictions(self) -> list[str]:
        of_ftrl = {"lambda1", "lambda2", "beta", "initial_accumulator"} if self.name != "ftrl" else {"eps", "l2"}
        return [
            f"optim.tables.{key} has no meaning for optim.tables.name = '{self.name}'. Remove it."
            for key in sorted(of_ftrl & set(self.changed_keys()))
        ]

    def problem_on_cuda(self) -> str | None:
        """Return why FBGEMM cannot train with these settings on GPUs."""
        if self.name == "ftrl":
            return "optim.tables.name = 'ftrl' on CUDA: FBGEMM has no FTRL. Use another optimizer, or train on CPU."
        if self.weight_decay and self.name in ("sgd", "adagrad"):
            return (
                f"optim.tables.weight_decay with optim.tables.name = '{self.name}' on CUDA: FBGEMM decays rows only "
                "with 'adam' and 'rowwise_adagrad'. Use one of them, or train on CPU."
            )
        if self.l2 and (self.name != "rowwise_adagrad" or self.weight_decay):
            return (
                "optim.tables.l2 on CUDA: FBGEMM has it only for optim.tables.name = 'rowwise_adagrad', without "
                "optim.tables.weight_decay. Use that, or train on CPU."
            )
        return None


_DECAY_KEYS = {"warmup_steps", "decay_start_step", "decay_steps", "end_lr"}
_SCHEDULE_KEYS = {
    "constant": set[str](),
    "mlperf": _DECAY_KEYS,
    "oneflow": _DECAY_KEYS,
    "linear": _DECAY_KEYS,
    "step": {"step_size", "gamma"},
    "plateau": {"patience", "gamma", "end_lr"},
}


class Schedule(Section):
    name: Literal["constant", "linear", "mlperf", "oneflow", "step", "plateau"] = key(
        "constant", "How both learning rates change; plateau: when validation stops improving."
    )
    warmup_steps: Steps = key(0, "Steps of linear warmup, or a share of the run like '5%' (linear, mlperf, oneflow).")
    decay_start_step: Steps = key(
        0, "First step of the decay, or a share of the run: linear, or quadratic (mlperf, oneflow)."
    )
    decay_steps: DecaySteps = key(
        0, "Steps of the decay, a share of the run, or 'to the end'; 0: no decay (linear, mlperf, oneflow)."
    )
    end_lr: float = key(
        0.0, "Learning rate at the end of the decay (linear, oneflow, plateau); mlperf: at least 1e-7.", ge=0.0
    )
    step_size: Steps = key(0, "Steps between two changes, or a share of the run (step).")
    gamma: PositiveFloat = key(0.1, "Factor of each change (step, plateau).")
    patience: PositiveInt = key(1, "Validations without an improvement before each change (plateau).")

    def contradictions(self) -> list[str]:
        changed = set(self.changed_keys()) - {"name"}
        problems = [
            f"optim.schedule.{key} has no meaning for optim.schedule.name = '{self.name}'. Remove it."
            for key in sorted(changed - _SCHEDULE_KEYS[self.name])
        ]
        if self.name == "step" and not self.step_size:
            problems.append("optim.schedule.name = 'step' needs optim.schedule.step_size. Set it to 1 or more.")
        is_comparable = type(self.decay_start_step) is type(self.warmup_steps)  # otherwise the data decides
        if is_comparable and (problem := self.overlap(10**9)):
            problems.append(problem)
        if self.name == "plateau" and self.gamma >= 1:
            problems.append(f"optim.schedule.gamma = {self.gamma:g}: with 'plateau' rates fall. Set it below 1.")
        if not self.decay_steps and self.name != "plateau":
            problems += [
                f"optim.schedule.{key} without optim.schedule.decay_steps does nothing. Set both."
                for key in sorted(changed & _SCHEDULE_KEYS[self.name] & {"decay_start_step", "end_lr"})
            ]
        return problems

    def overlap(self, total: int) -> str | None:
        """Return a sentence if the decay starts before the end of warmup in a run of `total` steps."""
        start, warmup = (number_of_steps(value, total) for value in (self.decay_start_step, self.warmup_steps))
        if not self.decay_steps or start >= warmup:
            return None
        return (
            f"optim.schedule.decay_start_step = {self.decay_start_step} is before the end of warmup, at step "
            f"{self.warmup_steps}. Start the decay at optim.schedule.warmup_steps or later."
        )


class OptimSection(Section):
    dense: DenseOptim = DenseOptim()
    tables: TablesOptim = TablesOptim()
    schedule: Schedule = Schedule()

    def contradictions(self) -> list[str]:
        rates = {"optim.dense.lr": self.dense.lr, "optim.tables.lr": self.tables.lr}
        end = self.schedule.end_lr
        return [
            f"optim.schedule.end_lr = {end} is above {key} = {rate}, where the decay starts. Lower it."
            for key, rate in rates.items()
            if end > rate
        ]


StopSignal = Literal["SIGTERM", "SIGUSR1", "SIGUSR2"]


class TrainSection(Section):
    seed: NonNegativeInt = key(1, "Seed of table and layer weights, sample order, masks and dropout.", lt=2**63)
    device: MayChange[Literal["auto", "cpu", "cuda"]] = key(
        "auto", "'auto': CUDA if there is a GPU and FBGEMM is built for it, otherwise CPU."
    )
    tf32: bool = key(False, "Let GPUs round the inputs of float32 multiplications to 10 bits.")
    precision: Literal["float32", "bfloat16", "float16"] = key(
        "float32", "Precision of the dense layers in training; float32 where it fails or is not faster."
    )
    kernels: MayChange[Literal["auto", "torch"]] = key(
        "auto", "On CPU: Recmill's C++ kernels if there is a compiler, or always PyTorch's and FBGEMM's."
    )
    loss_scale: float = key(0.0, "Factor of the loss (float16 only); 0: chosen automatically.", ge=0.0)
    global_batch_size: PositiveInt = key(2048, "Samples per step, over all processes together.", lt=2**31)
    num_epochs: MayChange[PositiveInt] = key(1, "Passes over the training split.")
    max_steps: MayChange[NonNegativeInt] = key(0, "Stop after this many steps; 0: no limit.")
    log_every_steps: MayChange[PositiveInt] = key(50, "Log the training loss every N steps.")
    check_replicas_every: MayChange[NonNegativeInt] = key(
        0, "Every N steps, check that all processes hold bit-identical dense layers; 0: never."
    )
    stop_signals: MayChange[list[StopSignal]] = key(
        ["SIGTERM", "SIGUSR1", "SIGUSR2"], "Signals on which training finishes its step, saves and exits with code 75."
    )
    max_restarts: MayChange[NonNegativeInt] = key(
        0, "How often a job restarts after one of its processes was killed, crashed or hung (--procs)."
    )
    join_seconds: MayChange[PositiveFloat] = key(
        600.0, "How long a process waits for the others of its job to start.", le=_MAX_SECONDS
    )
    hang_seconds: MayChange[float] = key(
        1800.0, "A process without progress for this long counts as hung.", ge=1.0, le=_MAX_SECONDS
    )

    def contradictions(self) -> list[str]:
        if not self.loss_scale or self.precision == "float16":
            return []
        return [
            f"train.loss_scale = {self.loss_scale:g} has no meaning for train.precision = '{self.precision}', "
            "whose gradients do not vanish. Remove it, or use 'float16'."
        ]


PROTOCOLS = "'full', or pop<N> or uni<N> with 1 to 999,999 negatives, like 'pop100'"


def is_protocol(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("full|(pop|uni)[1-9][0-9]{0,5}", value) is not None


def _checked_protocol(value: Any) -> str:
    if not is_protocol(value):
        raise PydanticCustomError("protocol", f"should be {PROTOCOLS}")
    return str(value)


RankingProtocol = Annotated[str, BeforeValidator(_checked_protocol)]


class EvalSection(Section):
    global_batch_size: PositiveInt = key(4096, "Samples per evaluation step, over all processes together.", lt=2**31)
    every_steps: Steps = key(0, "Validate every N steps, or a share of the run like '10%'; 0: after each epoch.")
    each_epoch: bool = key(False, "If every_steps is set, validate after each epoch as well.")
    before_training: bool = key(False, "Validate before the first step, as a baseline (step 0).")
    target_auroc: float = key(0.0, "Stop when validation reaches this AUROC (clicks); 0: off.", ge=0.0, le=1.0)
    patience: Steps = key(
        0, "Stop after N validations without an improvement, or after a share of the run like '25%'; 0: off."
    )
    protocols: list[RankingProtocol] = key(
        ["full", "pop100"], "How targets are ranked: full, pop<N>, uni<N> (histories only).", min_length=1
    )
    ks: list[PositiveInt] = key([1, 5, 10], "Cut-offs of HR@K, NDCG@K and MRR@K (histories, two_tower).", min_length=1)
    group: str = key(
        "", "A kept column of the dataset, like user_id: gauc is the mean AUROC of its values, by their rows (clicks)."
    )
    metrics: list[str] = key([], "Further metrics: modules like my_package.accuracy, or entry points.")
    test: bool = key(True, "Test the run when it ends. false: the test split is never read.")
    bootstrap: NonNegativeInt = key(0, "Resamples for 95 % intervals of the final test; 0: none.", le=100_000)


class CheckpointSection(Section):
    every_steps: Steps = key(0, "Save every N steps, or a share of the run like '10%'; 0: after each epoch.")
    every_minutes: float = key(0.0, "Save every N minutes as well; 0: off.", ge=0.0)
    each_eval: bool = key(False, "Save after each validation as well.")
    at_start: bool = key(False, "Save before the first step as well, to find out whether saving works.")
    background: bool = key(True, "Continue training while a copy is written, if memory allows.")
    on_error: Literal["stop", "continue"] = key(
        "stop", "If a checkpoint cannot be written (disk full): stop with an error, or train without it."
    )
    full_every: PositiveInt = key(
        1, "Write a full checkpoint every N saves; the others hold only rows changed since then."
    )
    row_bits: Literal[32, 8] = key(32, "Bits per value of changed rows; 8 is a quarter of the bytes, but not exact.")
    keep: PositiveInt = key(2, "Number of newest checkpoints to keep.", ge=2)
    keep_best: bool = key(
        False, "Save when a validation is the best so far (AUROC, NDCG), and keep that checkpoint as well."
    )

    def contradictions(self) -> list[str]:
        if self.row_bits == 8 and self.full_every == 1:
            return ["checkpoint.row_bits = 8 without checkpoint.full_every does nothing. Set both."]
        return []


class ObserveSection(Section):
    record: bool = key(True, "Write the steps, spans and counters of each process to the run's trace/.")
    profile_steps: list[NonNegativeInt] = key(
        [], "Record the steps after the first number up to the second with torch's profiler, like [50, 60]."
    )
    tensorboard: bool = key(False, "Write metrics for TensorBoard to the run's tensorboard/ as well.")
    mlperf: bool = key(False, "Write mlperf.log, which MLPerf's compliance checker reads (dcnv2 only).")
    mlperf_division: Literal["open", "closed"] = key("open", "MLPerf division: open or closed.")
    mlperf_org: str = key("unnamed", "Submitter's name in the MLPerf log.", min_length=1)

    def contradictions(self) -> list[str]:
        steps = self.profile_steps
        problems = []
        if steps and not self.record:
            problems.append("observe.profile_steps without observe.record does nothing. Set both.")
        elif steps and (len(steps) != 2 or steps[0] >= steps[1]):
            fact = f"observe.profile_steps = {steps}: should be two numbers"
            problems.append(f"{fact}, the second one larger, like [50, 60].")
        if not self.mlperf:
            ignored = [key for key in self.changed_keys() if key.startswith("mlperf_")]
            problems += [f"observe.{key} without observe.mlperf does nothing. Set both." for key in ignored]
        return problems


class Settings(Section):
    """All sections but the model's, whose keys depend on its name."""

    data: DataSection
    tables: TablesSection = TablesSection()
    sharding: MayChange[ShardingSection] = ShardingSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    eval: MayChange[EvalSection] = EvalSection()
    checkpoint: MayChange[CheckpointSection] = CheckpointSection()
    observe: MayChange[ObserveSection] = ObserveSection()

    def contradictions(self) -> list[str]:
        problems = self._contradictions_of_stores()
        requested = self.sharding.requested_types()
        optimizer = self.optim.tables.name
        if self.train.device == "cuda" and (problem := self.optim.tables.problem_on_cuda()):
            problems.append(problem)
        splits_rows = [key for key, kind in requested.items() if kind in ("column_wise", "grid")]
        if optimizer == "rowwise_adagrad" and splits_rows:
            key = splits_rows[0]
            problems.append(
                f"{key} = '{requested[key]}' with optim.tables.name = 'rowwise_adagrad': each shard of a row would "
                "keep a state of its own, so the run would depend on the number of processes. Use 'adagrad' or "
                "'row_wise'."
            )
        follows_validation = {
            "eval.patience": self.eval.patience,
            "checkpoint.keep_best": self.checkpoint.keep_best,
            "optim.schedule.name = 'plateau'": self.optim.schedule.name == "plateau",
        }
        if self.data.train_on_validation:
            problems += [
                f"data.train_on_validation with {key}: validation says nothing about a run that trains on it. "
                "Remove one of the two."
                for key, is_set in follows_validation.items()
                if is_set
            ]
        return problems

    def _contradictions_of_stores(self) -> list[str]:
        cached = [f"{key} = 'cached_ssd'" for key, s in self.tables.requested_stores().items() if s == "cached_ssd"]
        cached += [f"tables.dynamic.{name}" for name in self.tables.dynamic]
        if not cached:
            return []
        store = cached[0]
        problems = [
            f"{key} = '{kind}' with {store}: such tables are sharded by table or by row. Use 'auto', 'table_wise' or "
            "'row_wise'."
            for key, kind in self.sharding.requested_types().items()
            if kind not in ("auto", "table_wise", "row_wise") and not self._is_in_memory(key)
        ]
        if self.train.device == "cuda":
            reason = DYNAMIC_ON_CUDA if store.startswith("tables.dynamic") else SSD_ON_CUDA
            problems.append(f"{store} with train.device = 'cuda': {reason}")
        if self.train.kernels == "torch":
            problems.append(f"{store} with train.kernels = 'torch': it is one of our own kernels. Use 'auto'.")
        if self.checkpoint.row_bits == 8:
            problems.append(f"{store} with checkpoint.row_bits = 8: such rows are saved exactly. Use 32.")
        if self.tables.dynamic and self.data.multi_hot.sizes:
            problems.append(
                "tables.dynamic with data.multi_hot.sizes: ids are added from tables of a known size. Remove one."
            )
        return problems

    def _is_in_memory(self, key: str) -> bool:
        """Return whether the sharding type that `key` requests is only for tables in memory."""
        name = key.removeprefix("sharding.tables.")
        if key == name or self.tables.dynamic.keys() & {name, ALL_TABLES}:
            return False
        return self.tables.stores.get(name, self.tables.store) != "cached_ssd"


def config_keys(section: type[Section] = Settings, prefix: str = "") -> list[str]:
    """Return all keys but the model's, like train.seed."""
    found = []
    for name, field in section.model_fields.items():
        inner = subsection(field)
        found += config_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return found
