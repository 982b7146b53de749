"""Lists the (token, slot) pairs that selected each block. A pair is token * SLOTS + slot."""

import triton
import triton.language as tl


@triton.jit
def count_pairs(
    chosen,  # [B, T, H, SLOTS] int32, -1: none
    counts,  # [B, H, blocks, segments] int32, zeros
    rank,  # as `chosen`: the place of each pair among those of its block and segment
    tokens, key_heads, blocks, segments, segment,
    SLOTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    batch = tl.program_id(1).to(tl.int64)
    inside = at < tokens * key_heads * SLOTS
    place = batch * tokens * key_heads * SLOTS + at
    block = tl.load(chosen + place, mask=inside, other=-1)
    token, key_head = at // (key_heads * SLOTS), at // SLOTS % key_heads
    taken = inside & (block >= 0)
    counter = counts + ((batch * key_heads + key_head) * blocks + block) * segments + token // segment
    number = tl.atomic_add(counter, 1, mask=taken, sem="relaxed")
    tl.store(rank + place, number, mask=taken)


@triton.jit
def list_pairs(
    chosen, rank,
    starts,  # [B, H, blocks * segments + 1] int32
    pairs,  # [B, H, T * SLOTS] int32
    tokens, key_heads, blocks, segments, segment,
    SLOTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    batch = tl.program_id(1).to(tl.int64)
    inside = at < tokens * key_heads * SLOTS
    place = batch * tokens * key_heads * SLOTS + at
    block = tl.load(chosen + place, mask=inside, other=-1)
    token, key_head = at // (key_heads * SLOTS), at // SLOTS % key_heads
    taken = inside & (block >= 0)
    z = batch * key_heads + key_head
    start = tl.load(
        starts + z * (blocks * segments + 1) + block * segments + token // segment, mask=taken, other=0
    )
    number = tl.load(rank + place, mask=taken, other=0)
    pair = token * SLOTS + at % SLOTS
    tl.store(pairs + z * tokens * SLOTS + start + number, pair.to(tl.int32), mask=taken)
