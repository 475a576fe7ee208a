"""Texts that resemble each other: MinHash signatures of their shingles, in an index.

The index is one of locality-sensitive hashing. Broder (1997), "On the resemblance and containment
of documents": the share of equal minima under random permutations estimates the Jaccard similarity
of two sets of shingles, here runs of neighbouring words. Its standard deviation is at most
``0.5 / sqrt(permutations)``.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from datasketch import MinHash, MinHashLSH

from rlhf_core.config.data import NearDuplicatesConfig
from rlhf_core.data.text import split_words

# An odd 64-bit multiplier, 2**64 over the golden ratio: a shingle's hash is a polynomial in it of
# its words' hashes.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


HALF, LOW_HALF = np.uint64(32), np.uint64(2**32 - 1)  # signatures are of 32-bit hashes


# Weights of superfluous and missed candidates in the choice of the bands. Misses cost more:
# candidates are verified.
WEIGHTS = (0.1, 0.9)


# A text that shares a band with so many others is not added: no lookup takes long, however alike
# all texts are.
CROWDED = 64


# Shingles that are permuted together: each takes eight bytes for every permutation.
SHINGLES = 2**14


def shingle_hashes(words: Sequence[str], size: int) -> npt.NDArray[np.uint64]:
    """Return the distinct 64-bit hashes of all runs of ``size`` words, or of a shorter text."""
    of_words = [zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words]
    hashes = np.array(of_words, np.uint64)
    size = min(size, len(words))
    count = len(words) - size + 1 if words else 0
    shingles = np.zeros(count, np.uint64)
    for offset in range(size):
        next_words = hashes[offset : offset + count]
        shingles = shingles * MULTIPLIER + next_words
    return np.unique(shingles)


class SimilarTexts:
    """An index of texts by their signatures, whose size adding and finding do not depend on."""

    def __init__(self, config: NearDuplicatesConfig) -> None:
        self._similarity = config.similarity
        self._words = config.shingle_words
        self._empty = MinHash(num_perm=config.permutations, seed=1, hashfunc=int)
        self._index = MinHashLSH(
            threshold=config.similarity, num_perm=config.permutations, weights=WEIGHTS
        )
        self._signatures: dict[int, MinHash] = {}

    def __len__(self) -> int:
        """Return how many texts are in the index."""
        return len(self._signatures)

    def signature(self, text: str) -> MinHash:
        """Return the signature of a text; white space and case do not count."""
        signature = self._empty.copy()
        shingles = shingle_hashes(split_words(text), self._words)
        hashes = (shingles ^ shingles >> HALF) & LOW_HALF
        for start in range(0, len(hashes), SHINGLES):
            part = hashes[start : start + SHINGLES]
            signature.update_batch(part.tolist())
        return signature

    def most_similar(
        self, signature: MinHash, without: Collection[int] = ()
    ) -> tuple[int, float] | None:
        """Return the text that resembles the signature most; None below the limit.

        It is given by the key that it was added with and its estimated Jaccard similarity.

        Args:
            without: Keys of texts that are left out.
        """
        found = self._index.query(signature)
        candidates = sorted(key for key in found if key not in without)
        candidates = candidates[:CROWDED]
        if not candidates:
            return None
        signatures = [self._signatures[key] for key in candidates]
        hashes = np.stack([known.hashvalues for known in signatures])
        similarities = np.mean(hashes == signature.hashvalues, axis=1)
        best = int(np.argmax(similarities))
        if similarities[best] < self._similarity:
            return None
        return candidates[best], float(similarities[best])

    def add(self, key: int, signature: MinHash) -> None:
        """Add a text under a new key, unless ``CROWDED`` others share a band with it."""
        if len(self._index.query(signature)) < CROWDED:
            self._signatures[key] = signature
            self._index.insert(key, signature, check_duplication=False)
