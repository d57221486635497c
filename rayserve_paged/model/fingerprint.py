"""The fingerprint model: a toy without weights whose output shows any wrong block.

Each KV slot holds an integer fingerprint of (token, position, adapter, attached content, weights
version, layer, head, key or value). The logits of a token are a hash of the fingerprints of its
sequence that its window lets it see, in the order of positions, as read through the block table of
each layer's group: a slot that is stale, mixed up, missing, hidden by mistake or of another
sequence changes them. All arithmetic is modulo 2**64, so equality is exact at any batch, chunking
and tensor-parallel width.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from rayserve_kernels.attention import AttentionBackend
from rayserve_kernels.layout import KVLayout, KVPool
from rayserve_kernels.metadata import AttentionMetadata
from rayserve_paged.core.attention_window import FULL_ATTENTION, AttentionWindow
from rayserve_paged.model.layer_groups import places_of
from rayserve_paged.model.parallel import Collectives, deal_heads
from rayserve_paged.model.row_content import RowContent
from rayserve_paged.model.spec import FingerprintConfig, ModelSpec
from rayserve_paged.model.step_batch import StepBatch

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_LOGIT_BITS = 24
_LOGIT_SCALE = 2.0**-20
"""24 bits are exact in fp32; scaled to [0, 16) they make a distribution worth sampling."""

_KEY, _VALUE = 0, 1


class FingerprintModel:
    """One rank's heads of a fingerprint model; a `build.StepModel`.

    Args:
        config: What makes the numbers.
        collectives: The ranks that hold the other heads.
        backend: Writes the fingerprints into the pool.

    Raises:
        InvalidInputError: The heads cannot be dealt over so many ranks.
    """

    def __init__(
        self, config: FingerprintConfig, collectives: Collectives, backend: AttentionBackend
    ) -> None:
        shares = deal_heads(config.num_heads, config.num_kv_heads, collectives.world_size)
        self.spec: ModelSpec = config.spec()
        self._config = config
        self._share = shares[collectives.rank]
        self._places = places_of(self.spec.layer_groups)
        self._collectives = collectives
        self._backend = backend

    def kv_layout(self, block_size: int) -> KVLayout:
        """Layout of this rank's pool: int64, one element per slot and head."""
        return KVLayout(
            num_layers=len(self.spec.layer_groups[0].layers),
            num_kv_heads=len(self._share.kv_heads),
            block_size=block_size,
            head_dim=1,
            dtype=torch.int64,
        )

    def forward(
        self,
        batch: StepBatch,
        pool: KVPool,
        take_scored: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor | None:
        """Write the tokens' fingerprints, then hash those of each wanted row's sequence.

        Args:
            batch: The step.
            pool: Of `kv_layout`; written in place.
            take_scored: As `StepModel.forward`.

        Returns:
            fp32 [num_logits, vocab_size] on rank 0, None elsewhere.
        """
        self._write(batch, pool)
        for rows in batch.scored_slices(self._config.vocab_size):
            logits = self._logits(dataclasses.replace(batch, logits_rows=rows), pool)
            if logits is not None and take_scored is not None:
                take_scored(logits)
        return self._logits(batch, pool)

    def _logits(self, batch: StepBatch, pool: KVPool) -> torch.Tensor | None:
        partial = self._read(batch, pool)
        # Halves are added apart, since a sum of 64-bit numbers may overflow, which a collective
        # need not wrap.
        halves = torch.stack((partial & 0xFFFFFFFF, _shift(partial, 32)))
        self._collectives.all_reduce(halves)
        total = halves[0] + (halves[1] << 32)
        return _logits(total, self._config.vocab_size) if self._collectives.rank == 0 else None

    def _write(self, batch: StepBatch, pool: KVPool) -> None:
        tokens = _mix(_mix(batch.token_ids) + batch.positions)
        if batch.salts is not None:
            tokens = torch.where(batch.salts == 0, tokens, _mix(tokens + batch.salts))
        tokens = tokens[:, None]
        for layer in range(self._config.num_layers):
            keys, values = (
                _mix(tokens + self._tensor(_head_salts(self._config, layer, part), pool)).unsqueeze(
                    2
                )
                for part in (_KEY, _VALUE)
            )
            group, index = self._places[layer]
            self._backend.write(pool, index, keys, values, batch.metadata[group])

    def _tensor(self, salts: Sequence[int], pool: KVPool) -> torch.Tensor:
        held = [salts[head] for head in self._share.kv_heads]
        return torch.tensor(held, dtype=torch.int64, device=pool.device)

    def _read(self, batch: StepBatch, pool: KVPool) -> torch.Tensor:
        """This rank's share of the hash of each wanted row, int64 [num_logits]."""
        spans = [_span(one, batch.logits_rows, pool.layout.block_size) for one in batch.metadata]
        total = torch.zeros_like(batch.logits_rows)
        num_sharing = len(self._share.query_heads) // len(self._share.kv_heads)
        for layer, (group, index) in enumerate(self._places):
            block_ids, seen = spans[group]
            order = _mix(torch.arange(seen.shape[1], device=pool.device))
            sums = [
                # [num_logits, width, kv_heads, block_size] -> [num_logits, kv_heads, places]
                (
                    _mix(view[block_ids, :, :, 0].transpose(1, 2).flatten(2) ^ order)
                    * seen[:, None]
                ).sum(-1)
                for view in (pool.key_view(index), pool.value_view(index))
            ]
            hashed = _mix(_mix(sums[0]) + sums[1]).repeat_interleave(num_sharing, dim=1)
            heads = torch.tensor(self._share.query_heads, device=pool.device)
            total += _mix(hashed + heads + layer * self._config.num_heads).sum(-1)
        return total


def _span(
    metadata: AttentionMetadata, rows: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block table and slots that each wanted row may see.

    Returns:
        int64 [num_logits, width], block 0 in place of blocks that are not seen, and bool
        [num_logits, width * block_size].
    """
    ends = metadata.query_start[1:].to(torch.int64)
    sequences = torch.searchsorted(ends, rows, right=True)
    num_read = metadata.seq_lens[sequences] - (ends[sequences] - 1 - rows)
    width = -(-int(num_read.max()) // block_size) if rows.numel() else 0
    places = torch.arange(width * block_size, device=rows.device)
    seen = places < num_read[:, None]
    if metadata.windows is not None and metadata.num_sinks is not None:
        first = num_read - metadata.windows[sequences]
        seen &= (places >= first[:, None]) | (places < metadata.num_sinks[sequences][:, None])
    tables = metadata.block_tables[sequences, :width].to(torch.int64)
    return tables * seen.unflatten(1, (width, block_size)).any(2), seen


def _head_salts(config: FingerprintConfig, layer: int, part: int) -> tuple[int, ...]:
    """What sets the fingerprints of each KV head of a layer apart, as signed 64-bit numbers."""
    model = _mix_int(_mix_int(0) + config.weights_version)
    place = _mix_int(model + 2 * layer + part)
    return tuple(_signed(_mix_int(place + head)) for head in range(config.num_kv_heads))


def _logits(hashes: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int64 [n] -> fp32 [n, vocab_size], exact multiples of 2**-20 in [0, 16)."""
    tokens = torch.arange(vocab_size, dtype=torch.int64, device=hashes.device)
    bits = _shift(_mix(_mix(hashes)[:, None] + tokens), 64 - _LOGIT_BITS)
    return bits.to(torch.float32) * _LOGIT_SCALE


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 on int64, which wraps as uint64 would."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MULTIPLIERS[0])
    x = (x ^ _shift(x, 27)) * _signed(_MULTIPLIERS[1])
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right as if unsigned."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _mix_int(x: int) -> int:
    """`_mix` on a Python integer, unsigned."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> 31)


class FingerprintOracle:
    """The logits of one sequence computed from its tokens alone, in Python integers.

    Args:
        config: Of the model.
        content: Adapter and attachments of the sequence.
        window: Of the request; the smaller one holds where a layer has one too.
    """

    def __init__(
        self,
        config: FingerprintConfig,
        content: RowContent | None = None,
        window: AttentionWindow = FULL_ATTENTION,
    ) -> None:
        self._config = config
        self._content = content
        layer_windows = config.layer_windows or (FULL_ATTENTION,) * config.num_layers
        self._windows = [own.tighter(window) for own in layer_windows]
        self._num_tokens = 0
        self._salts = {
            (layer, head, part): salt
            for layer in range(config.num_layers)
            for part in (_KEY, _VALUE)
            for head, salt in enumerate(_head_salts(config, layer, part))
        }
        self._sums = dict.fromkeys(self._salts, 0)
        # What each token adds, where a window takes it out again.
        self._parts: dict[tuple[int, int, int], list[int]] = {place: [] for place in self._salts}

    def append(self, token_id: int) -> None:
        """Add the next token of the sequence."""
        token = _mix_int(_mix_int(token_id) + self._num_tokens)
        if self._content is not None and (salt := int(self._content.salts(self._num_tokens, 1)[0])):
            token = _mix_int((token + salt) & _MASK)
        order = _mix_int(self._num_tokens)
        for place, salt in self._salts.items():
            part = _mix_int(_mix_int(token + salt) ^ order)
            if self._windows[place[0]].size is None:
                self._sums[place] += part
            else:
                self._parts[place].append(part)
        self._num_tokens += 1

    def _sum(self, layer: int, head: int, part: int) -> int:
        window = self._windows[layer]
        if window.size is None:
            return self._sums[layer, head, part]
        first = max(0, self._num_tokens - window.size)
        return sum(
            added
            for position, added in enumerate(self._parts[layer, head, part])
            if position >= first or position < window.num_sink_tokens
        )

    def logits(self) -> torch.Tensor:
        """fp32 [vocab_size] after the last token."""
        config = self._config
        group = config.num_heads // config.num_kv_heads
        total = 0
        for layer in range(config.num_layers):
            for head in range(config.num_heads):
                keys = self._sum(layer, head // group, _KEY)
                values = self._sum(layer, head // group, _VALUE)
                hashed = _mix_int(_mix_int(keys) + values)
                total += _mix_int(hashed + head + layer * config.num_heads)
        return _logits(torch.tensor([_signed(total & _MASK)]), config.vocab_size)[0]


def oracle(
    prompt_ids: Sequence[int],
    num_tokens: int,
    config: FingerprintConfig | None = None,
    content: RowContent | None = None,
    window: AttentionWindow = FULL_ATTENTION,
) -> list[int]:
    """Greedy output of a fingerprint model, computed without any cache.

    Args:
        prompt_ids: The prompt.
        num_tokens: Output tokens; end ids do not end the output.
        config: Of the model; None for the default one.
        content: Adapter and attachments of the request.
        window: Of the request.
    """
    state = FingerprintOracle(config or FingerprintConfig(), content, window)
    for token_id in prompt_ids:
        state.append(token_id)
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(int(state.logits().argmax()))
        state.append(output[-1])
    return output
