"""Mixed precision: whether the hardware is good at it, and how the loss is scaled so that float16 gradients survive."""

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
from recmill.world import World

log = logging.getLogger(__name__)

# torch's GradScaler has the same numbers.
_FIRST_SCALE, _GROWTH, _BACKOFF, _STEPS_TO_GROW = 2.0**16, 2.0, 0.5, 2000


def usable_dtype(train: TrainSection, world: World) -> torch.dtype:
    """Return the dtype of the config, or float32 if it does not work or is not faster on every machine of the job.

    All ranks take part and get the same. One log line says why.
    """
    if world.is_main and train.tf32 and world.device.type != "cuda":
        log.info("train.tf32 is off: GPUs alone have it")
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
    """Return whether this rank's hardware should be used with it, and why."""
    if world.device.type == "cuda":
        is_slow = precision == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return not is_slow, f"{torch.cuda.get_device_name(world.device)} {'only emulates' if is_slow else 'has'} it"
    if world.local_rank:
        return True, ""  # one process of each machine is enough
    return verdict(probe(precision, threads_per_process(world.local_size)))


class LossScale:
    """Keeps float16 gradients from vanishing, and leaves out the steps where they overflow.

    FBGEMM's kernels update their rows *in* backward, when later gradients are not known yet. So backward stops at the
    tables' outputs; only if all gradients of all ranks are finite does it go on into the tables, unscaled. A step that
    is left out changes neither dense layers nor tables nor any optimizer's state.
    """

    def __init__(self, model: nn.Module, setting: float, start: Position) -> None:
        self._is_static = setting > 0
        self.value = setting or start.loss_scale or _FIRST_SCALE
        self._steps = start.steps_at_scale
        self._outputs: list[tuple[Tensor, Tensor]] = []  # of the tables, and as the dense layers see them
        for module in model.modules():
            if isinstance(module, ShardedModule):
                module.register_forward_hook(self._watch)

    def noted(self, position: Position) -> Position:
        return replace(position, loss_scale=self.value, steps_at_scale=self._steps)

    def finish_backward(self, dense: list[nn.Parameter], world: World) -> bool:
        """After backward of the scaled loss: unscale and go on into the tables, or False. All ranks take part."""
        outputs, self._outputs = self._outputs, []
        gradients = [weight.grad for weight in dense if weight.grad is not None]
        gradients += [seen.grad for _, seen in outputs if seen.grad is not None]
        largest = torch.nn.utils.get_total_norm(gradients, norm_type=float("inf"))
        (bad_ranks,) = world.sum([float(not torch.isfinite(largest))])
        if not bad_ranks:
            for gradient in gradients:
                gradient.div_(self.value)
            torch.autograd.backward([out for out, _ in outputs], [_gradient(seen) for _, seen in outputs])
        self._adapt(int(bad_ranks), world)
        return not bad_ranks

    def _adapt(self, bad_ranks: int, world: World) -> None:
        if bad_ranks and self._is_static:
            raise UserError(
                f"float16 gradients overflowed on {bad_ranks} of {world.size} rank(s) with train.loss_scale = "
                f"{self.value:g}. The checkpoints on disk are from before. Use a smaller one, or 0, into another --run."
            )
        if bad_ranks:
            self.value, self._steps = self.value * _BACKOFF, 0
            if world.is_main:
                log.info("float16 gradients overflowed: step left out, loss scale now %g", self.value)
            return
        self._steps += 1
        if self._steps == _STEPS_TO_GROW and not self._is_static:
            self.value, self._steps = self.value * _GROWTH, 0

    def _watch(self, tables: nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        if isinstance(output, KeyedTensor):
            return self._cut(output)
        output.callbacks.append(self._cut)  # it comes when the ranks have exchanged it
        return output

    def _cut(self, output: Any) -> Any:
        if isinstance(output, KeyedTensor):
            return KeyedTensor(output.keys(), output.length_per_key(), self._seen(output.values()))
        return {name: JaggedTensor(self._seen(rows.values()), lengths=rows.lengths()) for name, rows in output.items()}

    def _seen(self, output: Tensor) -> Tensor:
        seen = output.detach().requires_grad_()
        self._outputs.append((output, seen))
        return seen


def _gradient(seen: Tensor) -> Tensor:
    return torch.zeros_like(seen) if seen.grad is None else seen.grad
