"""The sections of a run config: types, defaults and the one-line help of every key.

A model's own section is the `Config` in its file under `models/`.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataSection(Section):
    path: str = Field(description="The prepared dataset's directory (as given: relative to where you are).")
    order: Literal["shuffled", "file"] = Field(
        "shuffled", description="Training order: a new permutation each epoch, or the files' own order."
    )


class TablesSection(Section):
    store: str = Field("device_mem", description="Where table rows live.")
    sharding: Literal["auto", "table_wise", "row_wise", "column_wise"] = Field(
        "auto", description="How tables are cut over processes: 'auto' leaves it to TorchRec's planner."
    )


class DenseOptim(Section):
    name: Literal["adam", "adamw", "adagrad", "sgd"] = Field("adam", description="Optimizer of all dense layers.")
    lr: PositiveFloat = Field(0.001, description="Learning rate of the dense layers.")
    weight_decay: float = Field(0.0, ge=0.0, description="Weight decay of the dense layers.")


class TablesOptim(Section):
    name: Literal["rowwise_adagrad", "adagrad", "sgd", "adam"] = Field(
        "rowwise_adagrad", description="Optimizer fused into the tables' backward; 'adam' needs CUDA."
    )
    lr: PositiveFloat = Field(0.05, description="Learning rate of the tables.")
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator (Adagrad, Adam).")


class OptimSection(Section):
    dense: DenseOptim = DenseOptim()
    tables: TablesOptim = TablesOptim()


class TrainSection(Section):
    seed: NonNegativeInt = Field(1, lt=2**63, description="Fixes tables, layers, sample order, masks and dropout.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="'auto': CUDA where there is a GPU, else CPU.")
    global_batch_size: PositiveInt = Field(2048, lt=2**31, description="Samples per step, over all processes together.")
    num_epochs: PositiveInt = Field(1, description="Passes over the training split.")
    max_steps: NonNegativeInt = Field(0, description="Stop after this many steps; 0: no limit.")
    log_every_steps: PositiveInt = Field(50, description="How often the training loss is logged.")


class EvalSection(Section):
    global_batch_size: PositiveInt = Field(
        4096, lt=2**31, description="Samples per evaluation step, over all processes."
    )
    every_steps: NonNegativeInt = Field(0, description="Validate every so many steps; 0: after each epoch.")
    protocols: list[Literal["full", "pop100"]] = Field(
        ["full", "pop100"], min_length=1, description="Ranking protocols (histories only)."
    )
    ks: list[PositiveInt] = Field([1, 5, 10], min_length=1, description="Cut-offs of HR@K and NDCG@K (histories only).")


class CheckpointSection(Section):
    every_steps: NonNegativeInt = Field(0, description="Save every so many steps; 0: after each epoch.")
    keep: PositiveInt = Field(2, ge=2, description="How many of the newest checkpoints stay on disk.")


class RunSections(Section):
    """Everything but the model, whose keys depend on its name."""

    data: DataSection
    tables: TablesSection = TablesSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @model_validator(mode="after")
    def no_contradictions(self) -> "RunSections":
        problems = []
        if self.train.device == "cpu" and self.optim.tables.name == "adam":
            problems.append(
                "optim.tables.name = 'adam' with train.device = 'cpu': FBGEMM has no fused Adam on CPU. "
                "Use 'rowwise_adagrad' or 'adagrad'."
            )
        if self.tables.sharding == "column_wise" and self.optim.tables.name == "rowwise_adagrad":
            problems.append(
                "tables.sharding = 'column_wise' with optim.tables.name = 'rowwise_adagrad': each piece would keep a "
                "state of its own, so the run would depend on the number of processes. Use 'adagrad' or 'row_wise'."
            )
        if problems:
            raise ValueError("\n  ".join(problems))
        return self
