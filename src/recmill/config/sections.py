"""The sections of a run config: types, defaults and the one-line help of every key.

A model's own section is the `Config` in its file under `models/`.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class MultiHotSection(Section):
    sizes: list[PositiveInt] = Field(
        [], description="Ids of a row by feature, or one number for all: others are added to its one. Empty: none."
    )
    distribution: Literal["uniform", "pareto"] = Field("uniform", description="Of the ids that are added.")
    min_table_size: NonNegativeInt = Field(0, description="Features of smaller tables keep their one id.")
    seed: NonNegativeInt = Field(0, lt=2**32, description="Which ids go together: 0 is the DLRM reference's.")
    collect_frequencies: bool = Field(
        False, description="At the end, write how often each id was trained on to frequencies.npz."
    )

    def ids_per_row(self, table_rows: list[int]) -> list[int]:
        """By feature."""
        sizes = self.sizes * len(table_rows) if len(self.sizes) == 1 else self.sizes
        return [s if rows >= self.min_table_size else 1 for s, rows in zip(sizes, table_rows, strict=True)]

    @model_validator(mode="after")
    def no_contradictions(self) -> "MultiHotSection":
        fields = type(self).model_fields
        useless = [key for key in fields if getattr(self, key) != fields[key].default]
        if useless and not self.sizes:
            raise ValueError(f"data.multi_hot.{useless[0]} without data.multi_hot.sizes does nothing. Set both.")
        return self


class DataSection(Section):
    path: str = Field(description="The prepared dataset's directory (as given: relative to where you are).")
    order: Literal["shuffled", "file", "batch"] = Field(
        "shuffled",
        description="Training order: a new permutation each epoch; the files' own; or that, mixed within each batch.",
    )
    drop_last: bool = Field(False, description="Leave out the last global batch of an epoch if it is not full.")
    limit_train_batches: NonNegativeInt = Field(0, description="Train on so many global batches an epoch; 0: all.")
    limit_val_batches: NonNegativeInt = Field(0, description="Validate on the first so many global batches; 0: all.")
    limit_test_batches: NonNegativeInt = Field(0, description="Test on the first so many global batches; 0: all.")
    prefetch: NonNegativeInt = Field(2, le=64, description="Batches prepared ahead, in the background; 0: none.")
    train_on_validation: bool = Field(
        False, description="Histories: train on the items of validation too, as BERT4Rec's own code does."
    )
    multi_hot: MultiHotSection = MultiHotSection()


class TablesSection(Section):
    store: str = Field("device_mem", description="Where table rows live.")


ShardingType = Literal["auto", "data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "grid"]


class ShardingSection(Section):
    mode: Literal["auto", "ddp"] = Field(
        "auto", description="'ddp': plain data parallelism, every table on every process."
    )
    default: ShardingType = Field(
        "auto", description="How tables are cut over processes: 'auto' leaves it to TorchRec's planner."
    )
    tables: dict[str, ShardingType] = Field({}, description="The same for single tables, by table or feature name.")

    def type_of(self, table: str, feature: str) -> ShardingType:
        if self.mode == "ddp":
            return "data_parallel"
        return self.tables.get(table, self.tables.get(feature, self.default))

    def asked_for(self) -> set[ShardingType]:
        return {"data_parallel"} if self.mode == "ddp" else {self.default, *self.tables.values()}


class DenseOptim(Section):
    name: Literal["adam", "adamw", "adagrad", "sgd"] = Field("adam", description="Optimizer of all dense layers.")
    lr: PositiveFloat = Field(0.001, description="Learning rate of the dense layers.")
    weight_decay: float = Field(0.0, ge=0.0, description="Weight decay of the dense layers.")
    eps: float = Field(
        0.0, ge=0.0, description="Added to the denominator; 0: torch's own (Adam 1e-8, Adagrad 1e-10). Not for SGD."
    )
    clip_grad_norm: float = Field(0.0, ge=0.0, description="Largest norm of all dense gradients together; 0: any.")

    @model_validator(mode="after")
    def no_contradictions(self) -> "DenseOptim":
        if self.eps and self.name == "sgd":
            raise ValueError("optim.dense.eps has no meaning for optim.dense.name = 'sgd'. Remove it.")
        return self


class TablesOptim(Section):
    name: Literal["rowwise_adagrad", "adagrad", "sgd", "adam"] = Field(
        "rowwise_adagrad", description="Optimizer of the tables; on CPU 'adam' needs data_parallel tables."
    )
    lr: PositiveFloat = Field(0.05, description="Learning rate of the tables.")
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator (Adagrad, Adam).")


_SCHEDULE_KEYS = {
    "constant": set[str](),
    "mlperf": {"warmup_steps", "decay_start_step", "decay_steps", "end_lr"},
    "oneflow": {"warmup_steps", "decay_start_step", "decay_steps", "end_lr"},
    "linear": {"warmup_steps", "decay_start_step", "decay_steps", "end_lr"},
    "step": {"step_size", "gamma"},
}


class Schedule(Section):
    name: Literal["constant", "linear", "mlperf", "oneflow", "step"] = Field(
        "constant", description="How both learning rates change from step to step."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Steps of linear warmup (linear, mlperf, oneflow).")
    decay_start_step: NonNegativeInt = Field(
        0, description="First step of the decay (linear; quadratic: mlperf, oneflow)."
    )
    decay_steps: NonNegativeInt = Field(0, description="Length of the decay; 0: none (linear, mlperf, oneflow).")
    end_lr: float = Field(0.0, ge=0.0, description="Where the decay ends (linear, oneflow); mlperf: at least 1e-7.")
    step_size: NonNegativeInt = Field(0, description="Steps between two changes (step).")
    gamma: PositiveFloat = Field(0.1, description="Factor of each change (step).")

    @model_validator(mode="after")
    def no_contradictions(self) -> "Schedule":
        fields = type(self).model_fields
        set_keys = {key for key in fields if key != "name" and getattr(self, key) != fields[key].default}
        problems = [
            f"optim.schedule.{key} has no meaning for optim.schedule.name = '{self.name}'. Remove it."
            for key in sorted(set_keys - _SCHEDULE_KEYS[self.name])
        ]
        if self.name == "step" and not self.step_size:
            problems.append("optim.schedule.name = 'step' needs optim.schedule.step_size. Set it to 1 or more.")
        if self.decay_steps and self.decay_start_step < self.warmup_steps:
            problems.append(
                f"optim.schedule.decay_start_step = {self.decay_start_step} is before the end of warmup, at step "
                f"{self.warmup_steps}. Start the decay at optim.schedule.warmup_steps or later."
            )
        if not self.decay_steps and (useless := set_keys & {"decay_start_step", "end_lr"}):
            problems.append(
                f"optim.schedule.{sorted(useless)[0]} without optim.schedule.decay_steps does nothing. Set both."
            )
        if problems:
            raise ValueError("\n  ".join(problems))
        return self


class OptimSection(Section):
    dense: DenseOptim = DenseOptim()
    tables: TablesOptim = TablesOptim()
    schedule: Schedule = Schedule()

    @model_validator(mode="after")
    def decay_goes_down(self) -> "OptimSection":
        lowest = min(self.dense.lr, self.tables.lr)
        if self.schedule.end_lr > lowest:
            raise ValueError(f"optim.schedule.end_lr = {self.schedule.end_lr} is above a learning rate, {lowest}.")
        return self


StopSignal = Literal["SIGTERM", "SIGUSR1", "SIGUSR2"]


class TrainSection(Section):
    seed: NonNegativeInt = Field(1, lt=2**63, description="Fixes tables, layers, sample order, masks and dropout.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="'auto': CUDA where there is a GPU, else CPU.")
    tf32: bool = Field(False, description="Let GPUs round the inputs of float32 multiplications to 10 bits.")
    precision: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="Of the dense layers while training; float32 where it fails or is not faster.",
    )
    kernels: Literal["auto", "torch"] = Field(
        "auto", description="On CPU: our own where a C++ compiler is, else torch's and FBGEMM's; or always those."
    )
    loss_scale: float = Field(0.0, ge=0.0, description="Loss times this (float16 only); 0: found by itself.")
    global_batch_size: PositiveInt = Field(2048, lt=2**31, description="Samples per step, over all processes together.")
    num_epochs: PositiveInt = Field(1, description="Passes over the training split.")
    max_steps: NonNegativeInt = Field(0, description="Stop after this many steps; 0: no limit.")
    log_every_steps: PositiveInt = Field(50, description="How often the training loss is logged.")
    check_replicas_every: NonNegativeInt = Field(
        0, description="Every so many steps see that all processes have the same dense layers, to the bit; 0: do not."
    )
    stop_signals: list[StopSignal] = Field(
        ["SIGTERM", "SIGUSR1", "SIGUSR2"], description="Signals that mean: finish the step, save, end with code 75."
    )
    max_restarts: NonNegativeInt = Field(
        0, description="How often a job whose process was killed, crashed or hung starts again (--procs)."
    )
    hang_seconds: PositiveFloat = Field(1800.0, description="A process that gets nowhere for so long has hung.")

    @model_validator(mode="after")
    def only_float16_is_scaled(self) -> "TrainSection":
        if self.loss_scale and self.precision != "float16":
            raise ValueError(
                f"train.loss_scale = {self.loss_scale:g} has no meaning for train.precision = '{self.precision}', "
                "whose gradients do not vanish. Remove it, or use 'float16'."
            )
        return self


RankingProtocol = Literal["full", "pop100", "uni100"]


class EvalSection(Section):
    global_batch_size: PositiveInt = Field(
        4096, lt=2**31, description="Samples per evaluation step, over all processes."
    )
    every_steps: NonNegativeInt = Field(0, description="Validate every so many steps; 0: after each epoch.")
    each_epoch: bool = Field(False, description="Validate after each epoch as well, where every_steps is set.")
    before_training: bool = Field(False, description="Validate before the first step: the baseline, as step 0.")
    target_auroc: float = Field(0.0, ge=0.0, le=1.0, description="Stop when validation reaches it (clicks); 0: off.")
    patience: NonNegativeInt = Field(0, description="Stop after so many validations without a better one; 0: off.")
    protocols: list[RankingProtocol] = Field(
        ["full", "pop100"], min_length=1, description="How targets are ranked: full, pop100, uni100 (histories only)."
    )
    ks: list[PositiveInt] = Field(
        [1, 5, 10], min_length=1, description="Cut-offs of HR@K, NDCG@K and MRR@K (histories only)."
    )


class CheckpointSection(Section):
    every_steps: NonNegativeInt = Field(0, description="Save every so many steps; 0: after each epoch.")
    every_minutes: float = Field(0.0, ge=0.0, description="Save when so many minutes have passed as well; 0: do not.")
    each_eval: bool = Field(False, description="Save after each validation as well.")
    at_start: bool = Field(False, description="Save before the first step as well, to see that it can be done.")
    background: bool = Field(True, description="Train on while a copy is written, if there is memory for it.")
    on_error: Literal["stop", "continue"] = Field(
        "stop",
        description="If a checkpoint cannot be written (a full disk): end with an error, or train on without it.",
    )
    full_every: PositiveInt = Field(
        1, description="Every so manieth is whole; those between hold the table rows that changed since. 1: all whole."
    )
    row_bits: Literal[32, 8] = Field(
        32, description="Of the values of changed rows: 8 is a quarter of the bytes, and not exact."
    )
    keep: PositiveInt = Field(2, ge=2, description="How many of the newest checkpoints stay on disk.")
    keep_best: bool = Field(False, description="Save each validation's best (auroc, ndcg) and keep it beside those.")

    @model_validator(mode="after")
    def no_contradictions(self) -> "CheckpointSection":
        if self.row_bits == 8 and self.full_every == 1:
            raise ValueError("checkpoint.row_bits = 8 without checkpoint.full_every does nothing. Set both.")
        return self


class Settings(Section):
    """Everything but the model, whose keys depend on its name."""

    data: DataSection
    tables: TablesSection = TablesSection()
    sharding: ShardingSection = ShardingSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @model_validator(mode="after")
    def no_contradictions(self) -> "Settings":
        problems = []
        asked_for, optimizer = self.sharding.asked_for(), self.optim.tables.name
        if self.sharding.mode == "ddp" and (self.sharding.default != "auto" or self.sharding.tables):
            problems.append(
                "sharding.mode = 'ddp' keeps every table on every process, but sharding.default or sharding.tables "
                "say otherwise. Remove them, or the mode."
            )
        if self.train.device == "cpu" and optimizer == "adam" and asked_for != {"data_parallel"}:
            problems.append(
                "optim.tables.name = 'adam' with train.device = 'cpu': FBGEMM has no fused Adam on CPU. "
                "Use 'rowwise_adagrad' or 'adagrad', or sharding.mode = 'ddp'."
            )
        if self.data.train_on_validation and (self.eval.patience or self.checkpoint.keep_best):
            key = "eval.patience" if self.eval.patience else "checkpoint.keep_best"
            problems.append(
                f"data.train_on_validation with {key}: validation cannot tell what is best when it is trained on. "
                "Remove one of the two."
            )
        if optimizer == "rowwise_adagrad" and (cut := asked_for & {"column_wise", "grid"}):
            problems.append(
                f"sharding '{min(cut)}' with optim.tables.name = 'rowwise_adagrad': each piece of a row would keep a "
                "state of its own, so the run would depend on the number of processes. Use 'adagrad' or 'row_wise'."
            )
        if problems:
            raise ValueError("\n  ".join(problems))
        return self
