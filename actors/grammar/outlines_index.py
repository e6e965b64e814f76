"""Token automata of regular expressions, made by outlines-core, as plain arrays that pass between processes as a file.

outlines-core walks every state of an expression's automaton with every token of the vocabulary. That can take minutes and
gigabytes (`.{0,200}` has a few hundred states with 49 000 ways out each), and can't be interrupted: so `build` is for processes
that may be killed and have a limit on their memory. Files hold no pickles.

Measured with SmolLM2's 49 152 tokens on one core, for expressions as `regex.normalize` writes them:

=========================  =======  ======  =========
expression                 seconds  states  ways
=========================  =======  ======  =========
``yes|no|maybe``           0.004    9       19
``\\d{3}-\\d{3}-\\d{4}``   0.025    13      102
``\\w{1,20}``              0.11     21      247 000
an e-mail address          0.14     38      253 000
JSON with three strings    2.0-4.0  1632    3 760 000
=========================  =======  ======  =========

llguidance takes 0.001 to 0.03 s for each, and makes its states while the output grows. A mask then takes 1 µs here, 10 to 20 µs
there. So `auto` waits 0.3 s for an automaton, and no longer.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from outlines_core import Index
from outlines_core import Vocabulary as OutlinesVocabulary

from radixcast.actors.grammar.vocabulary import Vocabulary
from radixcast.protocols.buffers import Int32Array

MAX_INDEX_BYTES = 64 << 20
"""Largest automaton that is kept (bytes of its arrays)."""
_FOLDER = "grammar"


class UnusableIndex(Exception):
    """No automaton: the expression is too large for one, or nothing in it can be written with these tokens."""


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """S states, E ways. The ways out of state s are [starts[s], starts[s + 1]) of `tokens` (ascending) and `targets`.

    From every state some final one can be reached. EOS ids and control tokens are on no way.
    """

    initial: int
    final: npt.NDArray[np.bool_]
    """[S]"""
    starts: npt.NDArray[np.int64]
    """[S + 1]"""
    tokens: Int32Array
    """[E]"""
    targets: Int32Array
    """[E]"""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.final.nbytes + self.starts.nbytes + self.tokens.nbytes + self.targets.nbytes

    def save(self, path: Path) -> None:
        """Write a file (0600), in one step: whoever opens `path` sees all of it or none."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with open(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
                np.savez(
                    file,
                    initial=np.int64(self.initial),
                    final=self.final,
                    starts=self.starts,
                    tokens=self.tokens,
                    targets=self.targets,
                )
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def index_file(run_dir: str | Path, key: str) -> Path:
    """Where the automaton of the constraint called `key` lies."""
    return Path(run_dir) / _FOLDER / f"{key}.npz"


def load(path: Path, rows: int) -> TokenAutomaton | None:
    """What `save` wrote; None when it is not there or not usable with a vocabulary of `rows` ids."""
    try:
        with np.load(path, allow_pickle=False) as file:
            automaton = TokenAutomaton(
                initial=int(file["initial"]),
                final=file["final"].astype(np.bool_),
                starts=file["starts"].astype(np.int64),
                tokens=file["tokens"].astype(np.int32),
                targets=file["targets"].astype(np.int32),
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return automaton if _consistent(automaton, rows) else None


def _consistent(automaton: TokenAutomaton, rows: int) -> bool:
    states, ways = len(automaton.final), len(automaton.tokens)
    starts, tokens, targets = automaton.starts, automaton.tokens, automaton.targets
    if len(starts) != states + 1 or len(targets) != ways or not 0 <= automaton.initial < states:
        return False
    if starts[0] != 0 or starts[-1] != ways or (np.diff(starts) < 0).any():
        return False
    return not ways or bool(tokens.min() >= 0 and tokens.max() < rows and targets.min() >= 0 and targets.max() < states)


def trim(folder: Path, max_bytes: int) -> None:
    """Remove the oldest automata of a run folder until `max_bytes` are left. Whoever misses one builds another way."""
    files = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder / _FOLDER):
            with contextlib.suppress(OSError):
                stat = entry.stat()
                files.append((stat.st_mtime_ns, stat.st_size, Path(entry.path)))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= max_bytes:
            break
        path.unlink(missing_ok=True)
        total -= size


# ------------------------------------------------------------------ building


def outlines_vocabulary(vocabulary: Vocabulary) -> Any:
    """The vocabulary in outlines-core's form (0.04 s for 49 000 tokens): without EOS ids and control tokens.

    Two ids behind the last one are not the model's: `rows` is outlines-core's one EOS, which leads nowhere; `rows` + 1 is the
    character that `build` puts in front.
    """
    ids: defaultdict[bytes, list[int]] = defaultdict(list)
    ends = set(vocabulary.eos_ids)
    for token, data in enumerate(vocabulary.tokens):
        if data and token not in ends:
            ids[data].append(token)
    ids[_FRONT].append(vocabulary.rows + 1)
    return OutlinesVocabulary(vocabulary.rows, dict(ids))


_FRONT = b"\x00"


def build(pattern: str, vocabulary: Any, rows: int) -> TokenAutomaton:
    """The automaton of a normalised expression. `vocabulary`: `outlines_vocabulary`'s; `rows`: ids of it.

    outlines-core 0.2.14 loses ways out of final states: of ``x(ab)*`` it knows ``x`` only. (It takes a state for a final one
    when that lies *behind* a final one, as regex-automata reports a match one byte late.) With ``\\z`` at the end no state is
    final before the end of the text; it takes that only if something comes before, so a character is put in front, and the
    automaton begins behind it.

    May take any time and memory. Raises UnusableIndex.
    """
    try:
        index = Index(rf"\x00(?:{pattern})\z", vocabulary)
    except (ValueError, RuntimeError) as error:
        raise UnusableIndex(str(error).split("\n", 1)[0]) from None
    transitions: dict[int, dict[int, int]] = index.get_transitions()
    finals = set(index.get_final_states())
    initial = transitions.pop(index.get_initial_state(), {}).get(rows + 1)
    ways = sum(map(len, transitions.values()))
    if initial is None:
        raise UnusableIndex("no text of it can be written with these tokens")
    if ways * 8 > MAX_INDEX_BYTES:
        raise UnusableIndex(f"{ways} ways")
    names = sorted({initial, *transitions, *finals})
    numbers = {name: number for number, name in enumerate(names)}
    tokens, targets, counts = _arrays([transitions.get(name, {}) for name in names], numbers, rows)
    final = np.array([name in finals for name in names], dtype=np.bool_)
    return _alive(TokenAutomaton(numbers[initial], final, _offsets(counts), tokens, targets))


def _arrays(
    steps: Sequence[dict[int, int]], numbers: dict[int, int], rows: int
) -> tuple[Int32Array, Int32Array, npt.NDArray[np.int64]]:
    """Ways of all states one after another, and how many each state has; without the two ids that are not the model's."""
    tokens, targets, counts = [], [], []
    for step in steps:
        step.pop(rows, None)
        step.pop(rows + 1, None)
        at = np.fromiter(step.keys(), np.int32, len(step))
        to = np.fromiter((numbers.get(target, -1) for target in step.values()), np.int32, len(step))
        order = np.argsort(at, kind="stable")
        order = order[to[order] >= 0]
        tokens.append(at[order])
        targets.append(to[order])
        counts.append(len(order))
    return np.concatenate(tokens), np.concatenate(targets), np.array(counts, dtype=np.int64)


def _offsets(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def _alive(automaton: TokenAutomaton) -> TokenAutomaton:
    """Without ways into states that reach no end: there a model would be stuck. Raises UnusableIndex when none is left."""
    states = len(automaton.final)
    sources = np.repeat(np.arange(states), np.diff(automaton.starts))
    before = defaultdict(list)
    for pair in np.unique(sources * states + automaton.targets).tolist():
        before[pair % states].append(pair // states)
    alive = automaton.final.copy()
    todo = np.flatnonzero(alive).tolist()
    while todo:
        for source in before[todo.pop()]:
            if not alive[source]:
                alive[source] = True
                todo.append(source)
    if not alive[automaton.initial]:
        raise UnusableIndex("no text of it can be written with these tokens")
    kept = alive[automaton.targets] & alive[sources]
    counts = np.bincount(sources[kept], minlength=states).astype(np.int64)
    return TokenAutomaton(automaton.initial, automaton.final, _offsets(counts), automaton.tokens[kept], automaton.targets[kept])
