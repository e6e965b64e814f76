"""Builder: grammars as the runner makes them, in its side thread, after the prover has shown that they can be made.

The limits that matter there are the backends' own: llguidance counts its work and gives up by itself; an automaton is read
from a file of known size. What takes long or dies has died in the prover's worker before.
"""

from __future__ import annotations

from pathlib import Path

from radixcast.actors.grammar.compile import compile_grammar
from radixcast.actors.grammar.interface import Compiled
from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.actors.setup import NodeSetup
from radixcast.protocols.grammar import GrammarSpec


class Builder:
    """Compiles with one vocabulary. `run_dir`: where the prover leaves automata (None: nowhere)."""

    def __init__(self, vocabulary: Vocabulary, run_dir: str | Path | None = None) -> None:
        self.vocabulary = vocabulary
        self._run_dir = run_dir

    def build(self, spec: GrammarSpec) -> Compiled:
        """Compile in this thread. Raises GrammarError and nothing else."""
        return compile_grammar(spec, self.vocabulary, run_dir=self._run_dir)


def make_runner_builder(setup: NodeSetup) -> Builder:
    """The builder of a node. Loads the vocabulary. Raises GrammarError (a model without a tokenizer), StartupError."""
    return Builder(Vocabulary.load(setup.model), setup.run_dir)
