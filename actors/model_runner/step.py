"""TorchExecutor: a StepPlan through the model and the sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from radixcast.actors.model_runner import report
from radixcast.actors.model_runner.batch import ForwardBatch
from radixcast.actors.model_runner.constraints import Allowed, GrammarOptions
from radixcast.actors.model_runner.executor import Outcome, TableExecutor
from radixcast.actors.model_runner.sampler import Sampler
from radixcast.actors.model_runner.tables import RowTables, StepLayout
from radixcast.protocols.internal import Capacity


class Model(Protocol):
    """What the executor needs of a model that keeps its KV in the slots it is told. Letters: H hidden size, V vocabulary."""

    def hidden(self, batch: ForwardBatch) -> torch.Tensor:
        """Write the KV of the batch's tokens; hidden states [L, H] of `batch.logit_tokens_L`."""

    def logits(self, hidden_LH: torch.Tensor) -> torch.Tensor:
        """[L, H] -> float32 [L, V], which the caller may overwrite."""


class TorchExecutor(TableExecutor):
    """Executes plans with a model on `device`. Use it from one thread only."""

    def __init__(
        self,
        model: Model,
        capacity: Capacity,
        *,
        vocab_size: int,
        device: torch.device,
        grammars: GrammarOptions | None = None,
    ) -> None:
        tables = RowTables(
            max_running=capacity.max_running,
            context_length=capacity.context_length,
            total_tokens=capacity.total_tokens,
            vocab_size=vocab_size,
        )
        super().__init__(tables, capacity, grammars)
        self._model = model
        self._device = device
        self._sampler = Sampler(tables, device)

    def compute(self, step: StepLayout) -> Outcome:
        """See TableExecutor."""
        with torch.inference_mode():
            logit_plan = report.plan_logits(self.tables, step)
            wait = self.constraints.begin(step)
            hidden_LH = self._model.hidden(self._batch(step, logit_plan.tokens_L))
            return self._finish(step, logit_plan, hidden_LH, wait)

    def check_device(self) -> None:
        """After a failed step: give memory back; a CUDA context that an illegal access broke raises again here."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _batch(self, step: StepLayout, tokens_L: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> ForwardBatch:
        max_kv = int(step.kv_lens_R.max())
        return ForwardBatch(
            token_ids_T=self._tensor(step.token_ids_T),
            positions_T=self._tensor(step.positions_T),
            row_starts=self._tensor(step.row_starts.astype(np.int32)),
            kv_lens_R=self._tensor(step.kv_lens_R.astype(np.int32)),
            page_table_RS=self._tensor(self.tables.page_table[step.rows_R, :max_kv]),
            out_slots_T=self._tensor(step.out_slots_T),
            logit_tokens_L=self._tensor(tokens_L),
            max_query=int(step.counts_R.max()),
            max_kv=max_kv,
        )

    def _finish(
        self, step: StepLayout, plan: report.LogitPlan, hidden_LH: torch.Tensor, wait: Callable[[], Allowed] | None
    ) -> Outcome:
        """Prompt logprobs, sampling, output logprobs."""
        tables, rows_D, logits_at = self.tables, step.rows_R[step.samples_R], plan.sampled_S
        prompts = report.prompt_logprobs(tables, plan.prompts, hidden_LH, self._model.logits)
        allowed = wait() if wait else None
        if allowed is not None:
            rows_D, logits_at = rows_D[allowed.drawn_S], logits_at[allowed.drawn_S]
        if not len(rows_D):
            return self.offer(step, allowed, np.zeros(0, np.int64), report.merge(prompts, {}))
        if len(logits_at) != len(hidden_LH):
            hidden_LH = hidden_LH.index_select(0, self._tensor(logits_at))
        logits_DV = self._model.logits(hidden_LH)
        asking_D = np.flatnonzero(tables.wants_logprobs[rows_D])
        # A copy of what the model said, before the sampler changes it.
        own_logits = logits_DV.index_select(0, self._tensor(asking_D)) if len(asking_D) else None
        tokens_D = self._sampler.sample(logits_DV, rows_D, tables.num_tokens[rows_D], allowed.masks if allowed else None)
        outputs = {}
        if own_logits is not None:
            outputs = report.output_logprobs(tables, rows_D[asking_D], own_logits, tokens_D[asking_D])
        return self.offer(step, allowed, tokens_D, report.merge(prompts, outputs))

    def _tensor(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
