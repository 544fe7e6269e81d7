"""Flags that several commands have, as field types of their Options."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

Procs = Annotated[PositiveInt, Field(description="Processes on this machine.")]
Verify = Annotated[bool, Field(description="Check every byte of the dataset before starting.")]
Which = Annotated[Literal["newest", "best"], Field(description="best: by validation, if checkpoint.keep_best was set.")]
Fallback = Annotated[bool, Field(description="If the newest checkpoint is corrupt, use the newest that is not.")]
