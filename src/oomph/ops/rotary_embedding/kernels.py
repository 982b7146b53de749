# mypy: disable-error-code="no-untyped-def"
"""The rotation as one pass over the input: read once, rotated in registers, written once.

The table is float32, so read per head it would weigh as much as the heads themselves. Each program keeps its
block of the table in registers over several heads, and the programs of one block run next to each other.
"""

import triton
import triton.language as tl


@triton.jit
def rotate(
    x, out, cos, sin,
    heads,
    rotated_heads,  # those after them are copied
    tokens,
    x_batch, x_head, x_token, x_last,
    out_batch, out_head, out_token, out_last,
    table_batch, table_token, token_blocks, head_groups,
    PAIRS: tl.constexpr, PAIRS_BLOCK: tl.constexpr,  # that are rotated; rounded up to a power of two
    COPIED: tl.constexpr, COPIED_BLOCK: tl.constexpr,  # numbers after the rotated ones, which are copied
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
    COPIES_HEADS: tl.constexpr,  # some heads are copied
    INVERSE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    group = program % head_groups
    block = program // head_groups
    batch = (block // token_blocks).to(tl.int64)  # 64 bits: an offset may pass 2**31
    token = ((block % token_blocks) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    pair = tl.arange(0, PAIRS_BLOCK)
    real_token = (token < tokens)[:, None]
    mask = real_token & (pair < PAIRS)[None, :]

    table = batch * table_batch + token[:, None] * table_token + pair[None, :]
    c = tl.load(cos + table, mask=mask, other=0.0)
    s = tl.load(sin + table, mask=mask, other=0.0)
    if INVERSE:
        s = -s

    x += batch * x_batch
    out += batch * out_batch
    for i in range(HEADS):
        head = (group * HEADS + i).to(tl.int64)
        x_rows = x + head * x_head + token[:, None] * x_token
        out_rows = out + head * out_head + token[:, None] * out_token
        here = mask & (head < heads)
        x1 = tl.load(x_rows + pair[None, :] * x_last, mask=here, other=0.0).to(c.dtype)
        x2 = tl.load(x_rows + (pair + PAIRS)[None, :] * x_last, mask=here, other=0.0).to(c.dtype)
        first, second = x1 * c - x2 * s, x1 * s + x2 * c
        if COPIES_HEADS:
            first = tl.where(head < rotated_heads, first, x1)
            second = tl.where(head < rotated_heads, second, x2)
        tl.store(out_rows + pair[None, :] * out_last, first.to(out.dtype.element_ty), mask=here)
        second = second.to(out.dtype.element_ty)
        tl.store(out_rows + (pair + PAIRS)[None, :] * out_last, second, mask=here)
        if COPIED > 0:
            last = 2 * PAIRS + tl.arange(0, COPIED_BLOCK)[None, :]
            copied_mask = real_token & (last < 2 * PAIRS + COPIED) & (head < heads)
            copied = tl.load(x_rows + last * x_last, mask=copied_mask)
            tl.store(out_rows + last * out_last, copied, mask=copied_mask)
