# mypy: disable-error-code="no-untyped-def"
"""What the kernels of delta attention share: where a chunk lies, and products with the decay between tokens.

Legend: C tokens of a chunk, i and j two of them (j before i), k a channel of the keys, la the log-decay.

The decay from token j to token i is exp(la_{j+1} + ... + la_i): never above 1, but a quotient exp(g_i) /
exp(g_j) of running sums does not give it safely, for either side may leave the range of float32. So pairs
are taken by level: at level s the chunk is cut into blocks of 2 * 2^s tokens, and the pairs are those with
i in the second half of a block and j in its first. The decay is then a product of two, from j to the middle
and from the middle to i; both exponents are sums of log-decays, hence <= 0, and every pair j < i belongs to
exactly one level. In a narrow chunk, where the log-decays of each half add up to little enough, quotients
by the middle are safe and serve all pairs at once.

Sums over tokens are products with matrices of zeros and ones on the tensor cores, exact because la is cut
into PARTS bfloat16 numbers that add up to it.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_bounds(chunk, chunk_start, chunk_rows, tokens, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """The first token of a chunk and how many it has."""
    if PACKED:
        start = tl.load(chunk_start + chunk).to(tl.int32)
        rows = tl.load(chunk_rows + chunk).to(tl.int32)
    else:
        start = chunk * CHUNK
        rows = tl.minimum(tokens - start, CHUNK)
    return start, rows


@triton.jit
def scratch_row(
    batch,
    start,
    first_chunk,
    chunk_start,
    rows,
    CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The row that token `start` has in a scratch tensor: of the whole call, or of one segment of it."""
    if WHOLE:
        row = start
    elif PACKED:
        row = start - tl.load(chunk_start + first_chunk).to(tl.int32)
    else:
        row = start - first_chunk * CHUNK
    return batch.to(tl.int64) * rows + row


@triton.jit
def tile(pointer, rows, columns, row_stride, has_row, COLUMNS: tl.constexpr):
    """Load rows x columns; zeros where there is no such row or column."""
    return tl.load(
        pointer + rows[:, None] * row_stride + columns[None, :],
        mask=has_row[:, None] & (columns < COLUMNS)[None, :],
        other=0.0,
    )


@triton.jit
def put(pointer, rows, columns, row_stride, has_row, COLUMNS: tl.constexpr, value):
    tl.store(
        pointer + rows[:, None] * row_stride + columns[None, :],
        value.to(pointer.dtype.element_ty),
        mask=has_row[:, None] & (columns < COLUMNS)[None, :],
    )


@triton.jit
def log_decay_tile(pointer, rows, columns, row_stride, has_row, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Log-decays. Very small ones, -inf among them, become -10000: exp gives 0 as well, 0 times it no NaN."""
    la = tile(pointer, rows, columns, row_stride, has_row, COLUMNS).to(tl.float32)
    la = tl.where(la < -10000.0, -10000.0, la)
    if PARTS == 1:
        la = la.to(tl.bfloat16)
    return la


@triton.jit
def exact_sums(pattern, x, PARTS: tl.constexpr):
    """pattern (zeros and ones) times x, as exact as a float32 sum: x as PARTS bfloat16 numbers.

    PARTS of 0 is for Triton's interpreter, which has no products of bfloat16.
    """
    total = tl.zeros(x.shape, dtype=tl.float32)
    if PARTS == 0:
        total = tl.dot(pattern.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
    else:
        pattern = pattern.to(tl.bfloat16)
        part = x.to(tl.bfloat16)
        total = tl.dot(pattern, part, total, input_precision="tf32")
        if PARTS > 1:
            rest = x - part.to(tl.float32)
            part = rest.to(tl.bfloat16)
            total = tl.dot(pattern, part, total, input_precision="tf32")
            if PARTS > 2:
                rest = rest - part.to(tl.float32)
                total = tl.dot(pattern, rest.to(tl.bfloat16), total, input_precision="tf32")
    return total


@triton.jit
def decay_to_middle(la, i, level, PARTS: tl.constexpr):
    """[C, k]: the decay from the middle of a token's block, or to it where the token is in the first half."""
    row = i[:, None]
    column = i[None, :]
    is_later = ((row >> level) & 1) == 1
    middle = (((row >> (level + 1)) << 1) + 1) << level
    first = tl.where(is_later, middle, row + 1)
    last = tl.where(is_later, row, middle - 1)
    return tl.exp(exact_sums((column >= first) & (column <= last), la, PARTS))


@triton.jit
def pairs_of(later, earlier, level):
    """Which pairs of tokens belong to the level."""
    same = (later >> (level + 1)) == (earlier >> (level + 1))
    return same & (((later >> level) & 1) > ((earlier >> level) & 1))


@triton.jit
def half_sums(la, i, CHUNK: tl.constexpr):
    """The log-decays of the first and of the second half of the chunk, added up."""
    first = tl.sum(tl.where(i[:, None] < CHUNK // 2, la.to(tl.float32), 0.0), axis=0)
    second = tl.sum(tl.where(i[:, None] < CHUNK // 2, 0.0, la.to(tl.float32)), axis=0)
    return first, second


@triton.jit
def running_sums(la, i, PARTS: tl.constexpr):
    """[C, k]: the log-decays from the first token to each, its own included."""
    return exact_sums(i[None, :] <= i[:, None], la, PARTS)


@triton.jit
def decay_to_end(la, i, PARTS: tl.constexpr):
    """[C, k]: the decay from each token to the end of the chunk, its own not included."""
    return tl.exp(exact_sums(i[None, :] > i[:, None], la, PARTS))
