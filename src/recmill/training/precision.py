"""Mixed precision: which dtypes the hardware is fast at, and loss scaling for float16."""

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from recmill.checkpoints.format import Position
from recmill.config.sections import TrainSection
from recmill.errors import UserError
from recmill.hardware.cpu import threads_per_process
from recmill.hardware.precision import Dtype, probe, verdict
from recmill.tables.torchrec_internals import when_ready
from recmill.world import World

log = logging.getLogger(__name__)

# The defaults of torch's GradScaler, which halves and doubles the scale as well.
_FIRST_SCALE = 2.0**16
_STEPS_TO_GROW = 2000


def set_tf32(train: TrainSection) -> None:
    """Let GPUs round the inputs of float32 products, or not. This is a setting of the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = train.tf32


def usable_dtype(train: TrainSection, world: World) -> torch.dtype:
    """Return the config's dtype, or float32 if it fails or is slower on any machine; log why. All ranks take part."""
    if world.is_main and train.tf32 and world.device.type != "cuda":
        log.info("train.tf32 is off: only GPUs have it")
    if train.precision == "float32":
        return torch.float32
    verdicts = world.gather(_verdict(train.precision, world))
    is_usable, why = world.broadcast(min(verdicts, key=lambda found: found[0]) if verdicts else (True, ""))
    if world.is_main:
        off = "" if is_usable else " is off, training in float32"
        log.info("train.precision = '%s'%s: %s", train.precision, off, why)
    dtype: torch.dtype = getattr(torch, train.precision if is_usable else "float32")
    return dtype


def _verdict(precision: Dtype, world: World) -> tuple[bool, str]:
    """Return whether this rank's hardware should compute in `precision`, and why."""
    if world.device.type == "cuda":
        is_slow = precision == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return not is_slow, f"{torch.cuda.get_device_name(world.device)} {'only emulates' if is_slow else 'has'} it"
    if world.local_rank:
        return True, ""  # one process of each machine is enough
    return verdict(probe(precision, threads_per_process(world.local_size)))


class LossScale:
    """Scales the loss so that float16 gradients do not vanish, and skips the steps in which they overflow.

    FBGEMM updates table rows *during* backward, when later gradients are not known yet. Backward therefore stops at the
    tables' outputs, and continues into the tables, unscaled, only if all gradients of all ranks are finite. A skipped
    step changes neither dense layers nor tables nor the state of any optimizer.
    """

    def __init__(self, model: nn.Module, setting: float, start: Position) -> None:
        self._is_static = setting > 0
        self.value = setting or start.loss_scale or _FIRST_SCALE
        self._steps = start.steps_at_scale
        self._outputs: list[tuple[Tensor, Tensor]] = []  # the tables' outputs, and the copies that dense layers see
        for module in model.modules():
            if isinstance(module, ShardedModule):
                module.register_forward_hook(self._on_forward)

    def recorded_in(self, position: Position) -> Position:
        return replace(position, loss_scale=self.value, steps_at_scale=self._steps)

    def finish_backward(self, dense: list[nn.Parameter], world: World) -> bool:
        """Unscale gradients and continue backward into the tables; False if they overflowed. All ranks take part."""
        outputs, self._outputs = self._outputs, []
        gradients = [weight.grad for weight in dense if weight.grad is not None]
        gradients += [copy.grad for _, copy in outputs if copy.grad is not None]
        largest = torch.nn.utils.get_total_norm(gradients, norm_type=float("inf"))
        (bad_ranks,) = world.sum([float(not torch.isfinite(largest))])
        if not bad_ranks:
            for gradient in gradients:
                gradient.div_(self.value)
            of_outputs = [torch.zeros_like(copy) if copy.grad is None else copy.grad for _, copy in outputs]
            torch.autograd.backward([output for output, _ in outputs], of_outputs)
        self._adapt(int(bad_ranks), world)
        return not bad_ranks

    def _adapt(self, bad_ranks: int, world: World) -> None:
        if bad_ranks and self._is_static:
            raise UserError(
                f"float16 gradients overflowed on {bad_ranks} of {world.size} rank(s) with train.loss_scale = "
                f"{self.value:g}. The checkpoints on disk are older. Use a smaller one, or 0, into another --run."
            )
        if bad_ranks:
            self.value /= 2
            self._steps = 0
            if world.is_main:
                log.info("float16 gradients overflowed: step skipped, loss scale now %g", self.value)
            return
        self._steps += 1
        if self._steps == _STEPS_TO_GROW and not self._is_static:
            self.value *= 2
            self._steps = 0

    def _on_forward(self, tables: nn.Module, inputs: object, output: Any) -> Any:
        """Replace the output of the tables with copies, now or once the ranks have exchanged it."""
        if not torch.is_grad_enabled():
            return output
        if isinstance(output, KeyedTensor):
            return self._with_copies(output)
        when_ready(output, self._with_copies)
        return output

    def _with_copies(self, output: Any) -> Any:
        if isinstance(output, KeyedTensor):
            return KeyedTensor(output.keys(), output.length_per_key(), self._copy(output.values()))
        return {name: JaggedTensor(self._copy(rows.values()), lengths=rows.lengths()) for name, rows in output.items()}

    def _copy(self, output: Tensor) -> Tensor:
        """Return a detached copy of a table's output for the dense layers, and remember both."""
        copy = output.detach().requires_grad_()
        self._outputs.append((output, copy))
        return copy
