"""Changes the logits that tokens are chosen from: bias, penalties, grammars, allowed and withheld.

The order is vLLM's: first the bias, then the repetition penalty, then frequency and presence. What
may not be chosen is -inf whatever else is done to it.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rayserve_paged.model.sampling_row import Ids, SamplingRow

FloatArray = npt.NDArray[np.float64]


def process_logits(logits: FloatArray, rows: Sequence[SamplingRow]) -> None:
    """Apply the parameters of each row to its logits, in place and for all rows at once.

    Args:
        logits: float64 [num_rows, vocab_size], without NaN or +inf.
        rows: What each row of the logits is for; none is refused.

    Raises:
        ValueError: A row's grammar cannot tell what may follow.
    """
    biased = [index for index, row in enumerate(rows) if len(row.logit_edits.bias_ids)]
    if biased:
        places = _places((index, rows[index].logit_edits.bias_ids) for index in biased)
        logits[places] += np.concatenate([rows[index].logit_edits.biases for index in biased])
    penalised = [index for index, row in enumerate(rows) if row.params.has_penalties]
    if penalised:
        _penalise(logits, penalised, rows)
    allowed = [
        (index, ids)
        for index, row in enumerate(rows)
        if (ids := row.logit_edits.allowed_ids) is not None
    ]
    if allowed:
        places = _places(allowed)
        kept = logits[places]
        logits[[index for index, _ids in allowed]] = -np.inf
        logits[places] = kept
    for index, row in enumerate(rows):
        forbidden = None if row.grammar is None else row.grammar.forbidden()
        if forbidden is not None:
            np.copyto(logits[index], -np.inf, where=forbidden)
    withheld = [(index, ids) for index, row in enumerate(rows) if len(ids := row.withheld_ids)]
    if withheld:
        logits[_places(withheld)] = -np.inf


def _penalise(logits: FloatArray, indices: list[int], rows: Sequence[SamplingRow]) -> None:
    """Source: repetition, Keskar et al., "CTRL", 2019, section 4.1, with the sign of the logit
    taken into account; presence and frequency, the OpenAI API.
    """
    seen, output_counts = [], []
    for index in indices:
        counts = rows[index].counts
        assert counts is not None, "a row without counts is refused"
        seen.append((index, counts.token_ids))
        output_counts.append(counts.output_counts)
    places = _places(seen)
    per_row = np.array(
        [
            (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            for params in (rows[index].params for index in indices)
        ]
    )
    sizes = [len(ids) for _index, ids in seen]
    repetition, frequency, presence = np.repeat(per_row, sizes, axis=0).T
    counted = np.concatenate(output_counts)
    # Each token of a row is in `places` once, so that nothing is written twice.
    values = logits[places]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counted
    values -= presence * (counted > 0)
    logits[places] = values


def _places(ids: Iterable[tuple[int, Ids]]) -> tuple[Ids, Ids]:
    """Row and column of each id: two int64 arrays that index the logits."""
    indices, columns = zip(*ids, strict=True)
    return np.repeat(indices, [len(part) for part in columns]), np.concatenate(columns)
