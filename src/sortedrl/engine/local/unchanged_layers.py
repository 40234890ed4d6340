"""The first layers of a model whose last layers are trained: what they computed stays right under all later weights.

With adapters in the last layers only (`lora.last_layers`), updates do not change the first layers. So a replay or a
resumption computes only the last layers and the head for the tokens that the engine has read before. The engine asks
the decoder at every publication which layers have changed, so nothing has to be configured here.

When an attempt ends or is interrupted, `UnchangedLayers` copies what the first layers computed for its tokens: their
keys and values, and the hidden states that they pass on. When the sample starts again, they are copied into its slot.
Guarantees: tokens and log-probs are the same as without, to the last bit. The copies take at most as much memory as the
cache of the slots; the oldest ones give way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from sortedrl.engine.attempt import Attempt
from sortedrl.engine.local.native_decoder import BlockCache, NativeDecoder, whole_blocks


@dataclass(slots=True, kw_only=True, frozen=True)
class _Copy:
    tokens: list[int]  # that the layers have read, prompt included
    keys_values: torch.Tensor  # [layers, 2, kv heads, positions, head size]
    hidden_lm: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.keys_values.nbytes + self.hidden_lm.nbytes


def make_unchanged_layers(decoder: object, cache: object) -> UnchangedLayers | None:
    """None if the decoder computes every layer anew."""
    if isinstance(decoder, NativeDecoder) and isinstance(cache, BlockCache):
        return UnchangedLayers(decoder, cache)
    return None


class UnchangedLayers:
    def __init__(self, decoder: NativeDecoder, cache: BlockCache) -> None:
        self._decoder, self._cache = decoder, cache
        self._most = cache.num_layers - 1  # tokens that start late need a layer to start at
        self._num_unchanged: int | None = None  # None before the first publication
        self._copies: dict[int, _Copy] = {}  # by sample, oldest first
        self._num_bytes = 0
        self._incomplete: set[int] = set()  # running samples that began when other layers were unchanged
        self._num_saved = 0

    @property
    def stats(self) -> dict[str, int]:
        """How many layers are unchanged, and for how many tokens they were not computed again."""
        return {"unchanged_layers": self._num_unchanged or 0, "late_tokens": self._num_saved}

    def publish(self, num_unchanged: int, running: Iterable[Attempt]) -> None:
        """The weights of all but the first `num_unchanged` layers have changed while these attempts ran."""
        known = self._most if self._num_unchanged is None else self._num_unchanged
        num_unchanged = min(num_unchanged, known)
        if num_unchanged == self._num_unchanged:
            return
        self._num_unchanged, self._num_bytes = num_unchanged, 0
        self._copies.clear()
        self._incomplete = {attempt.request.sample for attempt in running}
        self._decoder.keep_hidden(num_unchanged)

    def keep(self, attempt: Attempt, slot: int) -> None:
        """Copy what the slot holds of an attempt that ends. The model has not read its last token."""
        sample = attempt.request.sample
        if not self._num_unchanged or sample in self._incomplete:
            return
        self._drop(sample)
        tokens = [*attempt.request.prompt, *attempt.tokens][: attempt.length - 1]
        store = self._cache.store[: self._num_unchanged, :, slot, :, : whole_blocks(len(tokens))]
        kept = _Copy(
            tokens=tokens,
            keys_values=store.clone(memory_format=torch.contiguous_format),
            hidden_lm=self._cache.hidden_slm[slot, : len(tokens)].clone(),
        )
        self._copies[sample] = kept
        self._num_bytes += kept.num_bytes
        while self._num_bytes > self._cache.num_bytes:
            self._drop(next(iter(self._copies)))

    def restore(self, attempts: Sequence[Attempt], tokens: Sequence[int], slot: int) -> int:
        """Copy what is known of starting attempts, which have the same tokens, into the slot.

        Returns for how many of the first tokens.
        """
        self._incomplete.difference_update(attempt.request.sample for attempt in attempts)
        kept = self._copies.get(attempts[0].request.sample)
        if kept is None:
            return 0
        differing = (place for place, (a, b) in enumerate(zip(tokens, kept.tokens, strict=False)) if a != b)
        num = next(differing, min(len(tokens), len(kept.tokens)))
        padded = whole_blocks(num)
        self._cache.store[: self._num_unchanged, :, slot, :, :padded].copy_(kept.keys_values[..., :padded, :])
        self._cache.hidden_slm[slot, :num].copy_(kept.hidden_lm[:num])
        self._num_saved += num
        return num

    def _drop(self, sample: int) -> None:
        if (kept := self._copies.pop(sample, None)) is not None:
            self._num_bytes -= kept.num_bytes
