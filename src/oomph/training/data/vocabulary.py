"""Learning a tokenizer from a bounded, evenly spread sample of the data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from oomph.errors import UserError
from oomph.training.data.needs import need
from oomph.training.data.permutation import Split
from oomph.training.data.pieces import cut
from oomph.training.data.sources.corpus import Corpus
from oomph.training.data.tokens import KINDS, SPECIALS, UNK, Bytes, Tokenizer, Trained
from oomph.units import KiB, MiB, format_bytes

SAMPLE = 64 * MiB
# A word, one sign that is no letter, or what some corpora write in the place of a rare word.
_WORDS = r"<unk>|\w+|[^\w\s]"
_FOUND = re.compile(_WORDS)
_BYTES = 256
# BPE of few tokens settles on little text, and its training takes a second for every few MiB.
_BPE_BYTES_PER_TOKEN = 16 * KiB


def learn(
    kind: str, vocab_size: int | None, corpus: Corpus, split: Split, sample_bytes: int = SAMPLE
) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens, special ones included (bytes: always 260).

    Data larger than `sample_bytes` are read in blocks spread evenly over them (BPE: at most 16 KiB for each
    token to learn); validation is never read.
    """
    if kind not in KINDS:
        raise UserError(f"tokenizer={kind!r} is not valid; choose from {', '.join(KINDS)}")
    least = {"words": len(SPECIALS) + 1, "bpe": _BYTES + len(SPECIALS), "bytes": Bytes.vocab_size}[kind]
    if vocab_size is not None and vocab_size < least:
        raise UserError(f"vocab_size={vocab_size} is too small for {kind}; give at least {least}")
    if kind == "bytes":
        return Bytes()
    if vocab_size is None:
        raise UserError(f"vocab_size is missing; a tokenizer of {kind} needs the number of tokens to learn")
    if kind == "bpe":
        sample_bytes = min(sample_bytes, vocab_size * _BPE_BYTES_PER_TOKEN)
    texts = sample(corpus, split, sample_bytes)
    learned = _learn_words(vocab_size, texts) if kind == "words" else _learn_bpe(vocab_size, texts)
    found = learned.vocab_size
    if found < vocab_size:
        what = "different words" if kind == "words" else "different tokens that BPE can form"
        where = corpus.name
        if corpus.size > sample_bytes:
            where = f"a sample of {format_bytes(sample_bytes)} of {where}"
        raise UserError(
            f"vocab_size={vocab_size} is larger than the data: {where} has {found - len(SPECIALS)} {what}, "
            f"{found} with {' '.join(SPECIALS)}; give vocab_size <= {found}"
        )
    return learned


def sample(corpus: Corpus, split: Split, sample_bytes: int) -> Iterator[str]:
    """Pieces of training blocks, every n-th block so that they come to about `sample_bytes`."""
    blocks = corpus.blocks
    wanted = blocks
    if corpus.size > sample_bytes:
        wanted = max(1, blocks * sample_bytes // corpus.size)
    for index in range(wanted):
        block = index * blocks // wanted
        if not split.is_held_out(block):
            for document in corpus.read(block):
                yield from cut(document)


def _learn_words(vocab_size: int, texts: Iterable[str]) -> Trained:
    """The most frequent words; among equals, the first in the alphabet.

    Counted here: the library's trainer takes five times as long, and does not say how many words there are.
    """
    tokenizers = need("tokenizers", "a vocabulary of words")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_FOUND.findall(text))
    for special in SPECIALS:
        counts.pop(special, None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    vocabulary = {word: index for index, word in enumerate([*SPECIALS, *ranked][:vocab_size])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=UNK))
    pattern = tokenizers.Regex(_WORDS)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, behavior="removed", invert=True)
    inner.add_special_tokens(list(SPECIALS))
    return Trained(inner, "words")


def _learn_bpe(vocab_size: int, texts: Iterable[str]) -> Trained:
    tokenizers = need("tokenizers", "byte-level BPE")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        # Every byte is a token, so that no text is ever unknown.
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    failed: list[UserError] = []

    def passed_on() -> Iterator[str]:
        # The library wraps what an iterator raises; the user's mistake is to be seen as it is.
        try:
            yield from texts
        except UserError as error:
            failed.append(error)

    inner.train_from_iterator(passed_on(), trainer=trainer)
    if failed:
        raise failed[0]
    return Trained(inner, "bpe")
