"""From server arguments to an executor that is ready: weights, KV pool, tables, one warm step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from radixcast.actors.model_runner.batch import ForwardBatch
from radixcast.actors.model_runner.constraints import GrammarOptions
from radixcast.actors.model_runner.executor import Executor
from radixcast.actors.model_runner.kv_pool import KVPool, size_pool
from radixcast.actors.model_runner.limits import make_capacity
from radixcast.actors.model_runner.models.base import DecoderModel
from radixcast.actors.model_runner.models.registry import load_model
from radixcast.actors.model_runner.placement import resolve_device, resolve_dtype
from radixcast.actors.model_runner.step import TorchExecutor
from radixcast.protocols.buffers import pack_ids
from radixcast.protocols.errors import StartupError
from radixcast.protocols.internal import RowOpen, StepPlan
from radixcast.protocols.model import ModelSpec
from radixcast.protocols.sampling import SamplingParams
from radixcast.protocols.server_args import ServerArgs

log = logging.getLogger(__name__)


def load_executor(
    args: ServerArgs, spec: ModelSpec, advance: Callable[[], None], grammars: GrammarOptions | None = None
) -> TorchExecutor:
    """Load the model, size and reserve the pool, run one small step. Logs how long each took.

    Raises StartupError for an unknown architecture, unreadable weights, a device or a pool that can't be had.
    """
    device = resolve_device(args)
    dtype = resolve_dtype(args, spec.config, device)
    started = time.perf_counter()
    model = load_model(spec, device=device, dtype=dtype, quantization=args.quantization, progress=_Progress(advance))
    log.info("loaded %s on %s in %.1f s", spec.name, device, time.perf_counter() - started)
    slots = size_pool(args, spec.config, device, model.weight_bytes)
    executor = TorchExecutor(
        PagedModel(model, KVPool(spec.config, slots, dtype, device)),
        make_capacity(args, spec, slots, device.type),
        vocab_size=spec.config.vocab_size,
        device=device,
        grammars=grammars,
    )
    started = time.perf_counter()
    warm_up(executor)
    log.info("warmed up in %.1f s", time.perf_counter() - started)
    return executor


class PagedModel:
    """A decoder with its KV pool: a step.Model."""

    def __init__(self, decoder: DecoderModel, pool: KVPool) -> None:
        self._decoder = decoder
        self._pool = pool

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """See step.Model."""
        hidden_TH = self._decoder.run_layers(self._decoder.embed(batch.token_ids_T), batch, self._pool)
        return hidden_TH.index_select(0, batch.logit_tokens_L)

    def logits(self, hidden_LH: torch.Tensor) -> torch.Tensor:
        """See step.Model."""
        return self._decoder.logits(hidden_LH)


def warm_up(executor: Executor) -> None:
    """A prompt of two tokens and one decode, so that what is built on first use (kernels, thread pools) is there.

    Leaves no row behind. Raises StartupError when the model can't compute even that.
    """
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    opening = RowOpen(
        row=0,
        prompt_ids=pack_ids([0, 0]),
        output_ids=b"",
        kv_slots=b"",
        sampling=sampling,
        choice=0,
        eos_ids=(),
        stop_ids=(),
        max_position=executor.capacity().context_length,
        min_position=0,
        logprobs=True,
        logprob_start=0,
        top_logprobs=1,
    )
    first_slot = 0
    for number, (opens, count) in enumerate((([opening], 2), ([], 1))):
        count = min(count, executor.capacity().total_tokens - first_slot)
        plan = StepPlan(
            number=number,
            opens=opens,
            rows=pack_ids([0]),
            counts=pack_ids([count]),
            slot_counts=pack_ids([count]),
            slots=pack_ids(range(first_slot, first_slot + count)),
        )
        first_slot += count
        if executor.execute(plan).error:
            raise StartupError("the model fails on two tokens; the log above has the cause")
    executor.reset()


class _Progress:
    """Logs loading in steps of a quarter, and tells that it goes on."""

    def __init__(self, advance: Callable[[], None]) -> None:
        self._advance = advance
        self._logged = 0

    def __call__(self, fraction: float) -> None:
        self._advance()
        quarter = int(4 * fraction)
        if quarter > self._logged:
            self._logged = quarter
            log.info("loading weights: %d %%", 25 * quarter)
