"""How the tokens of a request are chosen and when it stops: every field, and its checks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

from rayserve_paged.core.beam_params import MAX_BEAM_WIDTH, MAX_LENGTH_PENALTY, check_beams
from rayserve_paged.core.beam_search import EarlyStopping
from rayserve_paged.core.errors import InvalidInputError
from rayserve_paged.core.field_checks import check_integer, check_number
from rayserve_paged.core.output_grammar import Grammar

MAX_LOGPROBS = 20
MAX_SIBLINGS = 128
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 300
MAX_STOP_STRINGS = 16
MAX_SEED = 2**63 - 1

_RANGES = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "length_penalty": (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it stops.

    Args:
        n: Parallel samples of one prompt, which is computed once.
        best_of: Samples to draw, of which the `n` with the highest cumulative log-probability are
            returned, best first; None for `n`, in the order of their draws.
        beam_width: Search instead of drawing: so many beams are followed, and the `n` hypotheses
            of the highest scores are returned, best first, all at the end. 1 to 64; None for no
            search. See docs/beam-search.md for what goes with it.
        length_penalty: The score of a hypothesis is its cumulative log-probability over its number
            of tokens to this power: above 0 longer ones score better. -10 to 10.
        early_stopping: When a search that has `beam_width` hypotheses ends: True at once; False
            when no beam, as long as it is, scores better than the worst of them; "never" when no
            beam could at any length.
        max_tokens: Most output tokens; None for all that the model's limit and the pool leave.
            Clamped to what the model's limit leaves after the prompt.
        min_tokens: Fewest output tokens: no end id, stop id or stop string ends it earlier.
        temperature: 0 is greedy.
        top_p: Nucleus: smallest set of tokens whose probability reaches it, in (0, 1].
        top_k: Most likely tokens kept; 0 or -1 keeps all.
        min_p: Tokens kept are at least this many times as likely as the most likely one, 0 to 1.
        repetition_penalty: The logit of a token that the prompt or the output holds is divided by
            it where positive and multiplied by it where negative; 1 changes nothing.
        presence_penalty: Taken off the logit of a token that the output holds, -2 to 2.
        frequency_penalty: Taken off the logit of a token once for each time that the output
            holds it, -2 to 2.
        logit_bias: What is added to the logits of tokens, by id, -100 to 100; becomes a tuple of
            (id, bias) in the order of ids.
        allowed_token_ids: Ids that may be chosen, others never; None for all. Becomes a tuple in
            the order of ids.
        seed: Draws depend on (seed, sibling, position) alone; the consumer draws one where this
            is None.
        ignore_eos: Go on past the model's end-of-sequence ids.
        stop: Strings that end the text; none of them is part of the output.
        include_stop_str_in_output: Leave the stop string that ended the text at its end.
        stop_token_ids: Ids that end the output (the id itself is part of token_ids).
        logprobs: Log-probabilities of this many most likely tokens with each output token;
            0 for the chosen token's alone, None for none.
        prompt_logprobs: The same for each prompt token but the first, from the model's logits
            before it. The prompt is then computed whole, whatever of it is cached.
        grammar: What the text of each output must be, of which tokens are chosen that go on with
            it and, where it is whole, ids that end the output; None for any text. Goes without
            `beam_width` and without `min_tokens`.

    Raises:
        InvalidInputError: Naming the field, the value and what would be accepted.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Check every field, and make tuples of those that hold several values."""
        check_integer("n", self.n, f"an integer from 1 to {MAX_SIBLINGS}", 1, MAX_SIBLINGS)
        if self.best_of is not None:
            accepted = f"an integer from n={self.n} to {MAX_SIBLINGS}, or None for n"
            check_integer("best_of", self.best_of, accepted, self.n, MAX_SIBLINGS)
        if self.beam_width is not None:
            accepted = f"an integer from 1 to {MAX_BEAM_WIDTH}, or None"
            check_integer("beam_width", self.beam_width, accepted, 1, MAX_BEAM_WIDTH)
        self._check_stopping()
        accepted = "a number above 0 and at most 1"
        if check_number("top_p", self.top_p, accepted, 0.0, 1.0) == 0.0:
            raise InvalidInputError("top_p", self.top_p, accepted)
        check_integer("top_k", self.top_k, "an integer of at least 1, or 0 or -1 for all", -1)
        if self.seed is not None:
            check_integer("seed", self.seed, f"an integer from 0 to {MAX_SEED}", 0, MAX_SEED)
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                accepted = f"an integer from 0 to {MAX_LOGPROBS}, or None"
                check_integer(field, getattr(self, field), accepted, 0, MAX_LOGPROBS)
        normal: dict[str, object] = {
            field: check_number(
                field, getattr(self, field), f"a number from {low:g} to {high:g}", low, high
            )
            for field, (low, high) in _RANGES.items()
        }
        normal["top_p"] = float(self.top_p)
        normal["stop"] = _stop_strings(self.stop)
        normal["stop_token_ids"] = _token_ids("stop_token_ids", self.stop_token_ids)
        normal["logit_bias"] = _biases(self.logit_bias)
        if self.allowed_token_ids is not None:
            normal["allowed_token_ids"] = _allowed_ids(self.allowed_token_ids)
        for field, value in normal.items():
            object.__setattr__(self, field, value)
        check_beams(self)
        self._check_grammar()
        if self.beam_width is not None:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def num_siblings(self) -> int:
        """Samples to draw, or hypotheses to return: `best_of`, or `n`."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_rows(self) -> int:
        """Sequences that run at once for it: its beams, or its samples."""
        return self.num_siblings if self.beam_width is None else self.beam_width

    @property
    def has_penalties(self) -> bool:
        """Whether the choice of a token depends on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def needs_history(self) -> bool:
        """Whether the choice of a token depends on those before it by more than the logits."""
        return self.has_penalties or self.grammar is not None

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept: (id, bias), in the order of ids."""
        return cast("tuple[tuple[int, float], ...]", self.logit_bias)

    def _check_stopping(self) -> None:
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, "an integer of at least 1, or None", 1)
        check_integer("min_tokens", self.min_tokens, "an integer of at least 0", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            accepted = f"at most max_tokens={self.max_tokens}"
            raise InvalidInputError("min_tokens", self.min_tokens, accepted)
        for field in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, field), bool):
                raise InvalidInputError(field, getattr(self, field), "true or false")

    def _check_grammar(self) -> None:
        grammar = self.grammar
        if grammar is None:
            return
        if not isinstance(grammar, Grammar):
            raise InvalidInputError("grammar", grammar, "a Grammar, or None")
        if self.beam_width is not None:
            accepted = f"None with a {grammar.field}, since a search knows none"
            raise InvalidInputError("beam_width", self.beam_width, accepted)
        if self.min_tokens > 1:
            accepted = f"0 or 1 with a {grammar.field}, which alone says when an output may end"
            raise InvalidInputError("min_tokens", self.min_tokens, accepted)


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    accepted = f"a non-empty string, or at most {MAX_STOP_STRINGS} of them"
    if not isinstance(strings, Sequence) or len(strings) > MAX_STOP_STRINGS:
        raise InvalidInputError("stop", stop, accepted)
    if not all(isinstance(string, str) and string for string in strings):
        raise InvalidInputError("stop", stop, accepted)
    return tuple(strings)


def _token_ids(field: str, ids: object) -> tuple[int, ...]:
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise InvalidInputError(field, ids, "a list of token ids")
    return tuple(check_integer(field, i, "token ids of at least 0", 0) for i in ids)


def _allowed_ids(ids: object) -> tuple[int, ...]:
    allowed = _token_ids("allowed_token_ids", ids)
    if not allowed:
        raise InvalidInputError("allowed_token_ids", ids, "at least one token id, or None for all")
    return tuple(sorted(set(allowed)))


def _biases(bias: object) -> tuple[tuple[int, float], ...]:
    accepted = (
        f"at most {MAX_BIASED_TOKENS} token ids of at least 0, "
        f"each with a number from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
    )
    entries = list(bias.items()) if isinstance(bias, Mapping) else bias
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise InvalidInputError("logit_bias", bias, accepted)
    if len(entries) > MAX_BIASED_TOKENS:
        raise InvalidInputError("logit_bias", bias, accepted)
    biases: dict[int, float] = {}
    for entry in entries:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise InvalidInputError("logit_bias", bias, accepted)
        token_id = check_integer("logit_bias", entry[0], accepted, 0)
        if token_id in biases:
            raise InvalidInputError("logit_bias", bias, "one bias for each token id")
        biases[token_id] = check_number(
            "logit_bias", entry[1], accepted, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS
        )
    return tuple(sorted(biases.items()))
