"""Lists the (token, slot) pairs that selected each block. A pair is token * SLOTS + slot."""

import triton
import triton.language as tl


@triton.jit
def rank_pairs(
    chosen,  # [B, T, H, SLOTS] int32, -1: none
    counts,  # [B, H, blocks, stretches] int32, zeros
    rank,  # as `chosen`: the place of each pair among those of its block and stretch
    tokens, key_heads, blocks, stretches, stretch,
    SLOTS: tl.constexpr, SLOTS_PADDED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program per stretch of a key/value head, token after token: places in the order of the tokens.

    Atomic counters would be as right, and give places in the order of arrival: gradients of the keys would
    then be summed in another order, and differ in their last bits, from run to run.
    """
    z, number = (tl.program_id(0) // stretches).to(tl.int64), tl.program_id(0) % stretches
    batch, key_head = z // key_heads, z % key_heads
    last = tl.minimum((number + 1) * stretch, tokens)
    counter = counts + z * blocks * stretches + number
    flat = tl.arange(0, TOKENS * SLOTS_PADDED)
    slot = flat % SLOTS_PADDED
    for start in range(number * stretch, last, TOKENS):
        t = start + flat // SLOTS_PADDED
        place = ((batch * tokens + t) * key_heads + key_head) * SLOTS + slot
        block = tl.load(chosen + place, mask=(t < last) & (slot < SLOTS), other=-1)
        taken = block >= 0
        same = block[:, None] == block[None, :]
        before = tl.sum((same & (flat[None, :] < flat[:, None])).to(tl.int32), 1)
        after = tl.sum((same & (flat[None, :] > flat[:, None])).to(tl.int32), 1)
        # Not from the cache of the first level: another thread of the program wrote it.
        place_of = tl.load(counter + block * stretches, mask=taken, other=0, cache_modifier=".cg") + before
        tl.store(rank + place, place_of, mask=taken)
        tl.debug_barrier()
        tl.store(counter + block * stretches, place_of + 1, mask=taken & (after == 0))
        tl.debug_barrier()


@triton.jit
def list_pairs(
    chosen, rank,
    starts,  # [B, H, blocks * stretches + 1] int32
    pairs,  # [B, H, T * SLOTS] int32
    tokens, key_heads, blocks, stretches, stretch,
    SLOTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    per_batch = tl.cdiv(tokens * key_heads * SLOTS, SIZE)
    batch = (tl.program_id(0) // per_batch).to(tl.int64)
    at = (tl.program_id(0) % per_batch).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < tokens * key_heads * SLOTS
    place = batch * tokens * key_heads * SLOTS + at
    block = tl.load(chosen + place, mask=inside, other=-1)
    token, key_head = at // (key_heads * SLOTS), at // SLOTS % key_heads
    taken = inside & (block >= 0)
    z = batch * key_heads + key_head
    start = tl.load(
        starts + z * (blocks * stretches + 1) + block * stretches + token // stretch, mask=taken, other=0
    )
    number = tl.load(rank + place, mask=taken, other=0)
    pair = token * SLOTS + at % SLOTS
    tl.store(pairs + z * tokens * SLOTS + start + number, pair.to(tl.int32), mask=taken)
