"""Kernels of linear_cross_entropy. The matrix products around them are cuBLAS's."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# In place of -inf as the first maximum: far below any logit. A power of two, so that its product with LOG2_E
# is exact: otherwise _exp_minus(LOWEST, LOWEST * LOG2_E) is exp2 of a rounding error of 1e22.
LOWEST = tl.constexpr(-(2.0**100))


@triton.jit
def _softcapped(x, cap):
    """cap * tanh(x / cap), with exp of negative numbers only, so that nothing overflows."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E / cap))
    bounded = cap * (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -bounded, bounded)


@triton.jit
def _logits(z, softcap, HAS_SOFTCAP: tl.constexpr):
    z = z.to(tl.float32)
    if HAS_SOFTCAP:
        z = _softcapped(z, softcap)
    return z


@triton.jit
def _exp_minus(z, top2):
    """exp(z - top), with the top in units of log 2: one multiply-add and one exp2."""
    return tl.exp2(tl.fma(z, LOG2_E, -top2))


@triton.jit
def _softcap_slope(z, softcap):
    """d capped / d logit, from the capped logit."""
    ratio = z / softcap
    return 1.0 - ratio * ratio


@triton.jit
def _load_logits(row, at, n_classes, softcap, MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    if MASKED:
        inside = at < n_classes
        z = tl.load(row + at, mask=inside, other=0.0, eviction_policy="evict_last")
        return tl.where(inside, _logits(z, softcap, HAS_SOFTCAP), -float("inf"))
    else:
        return _logits(tl.load(row + at, eviction_policy="evict_last"), softcap, HAS_SOFTCAP)


@triton.jit
def _smooth_term(at, z, n_classes, class_weight, HAS_CLASS_WEIGHT: tl.constexpr):
    inside = at < n_classes
    z = tl.where(inside, z, 0.0)
    if HAS_CLASS_WEIGHT:
        z *= tl.load(class_weight + at, mask=inside, other=0.0)
    return z


@triton.jit
def _add_four_blocks(
    row,
    at,  # [BLOCK] classes of the first of the four
    n_classes, class_weight, softcap, top, total, smooth,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,  # some of the classes are beyond the last
    SMOOTH: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Four loads in flight at a time, which share the rescaling of the running sum."""
    z0 = _load_logits(row, at, n_classes, softcap, MASKED, HAS_SOFTCAP)
    z1 = _load_logits(row, at + BLOCK, n_classes, softcap, MASKED, HAS_SOFTCAP)
    z2 = _load_logits(row, at + 2 * BLOCK, n_classes, softcap, MASKED, HAS_SOFTCAP)
    z3 = _load_logits(row, at + 3 * BLOCK, n_classes, softcap, MASKED, HAS_SOFTCAP)
    new_top = tl.maximum(tl.maximum(top, tl.maximum(z0, z1)), tl.maximum(z2, z3))
    top2 = new_top * LOG2_E
    total = total * _exp_minus(top, top2) + _exp_minus(z0, top2) + _exp_minus(z1, top2)
    total += _exp_minus(z2, top2) + _exp_minus(z3, top2)
    if SMOOTH:
        smooth += _smooth_term(at, z0, n_classes, class_weight, HAS_CLASS_WEIGHT)
        smooth += _smooth_term(at + BLOCK, z1, n_classes, class_weight, HAS_CLASS_WEIGHT)
        smooth += _smooth_term(at + 2 * BLOCK, z2, n_classes, class_weight, HAS_CLASS_WEIGHT)
        smooth += _smooth_term(at + 3 * BLOCK, z3, n_classes, class_weight, HAS_CLASS_WEIGHT)
    return new_top, total, smooth


@triton.jit
def _gradient(
    at, inside, z, lse2, on_softmax, evenly, class_weight, softcap,
    SMOOTH: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Of the loss, with respect to logits of classes that are not the target."""
    g = on_softmax * _exp_minus(z, lse2)
    if SMOOTH:
        if HAS_CLASS_WEIGHT:
            g -= evenly * tl.load(class_weight + at, mask=inside, other=0.0)
        else:
            g -= evenly
    if HAS_SOFTCAP:
        g *= _softcap_slope(z, softcap)
    return g


@triton.jit
def softmax_rows(
    logits,  # [rows, V]; overwritten with d loss / d logits where WRITE_GRADIENT
    row_stride,
    target,  # [rows] int64; outside [column, column + V): it is in another part of the vocabulary
    column,
    valid,  # [rows] bool; False: the row is ignored
    scale,  # [rows] fp32: what this row's loss is multiplied with
    target_weight,  # [rows] fp32: class weight of the target, read where HAS_CLASS_WEIGHT
    class_weight,  # [V] fp32, read where HAS_CLASS_WEIGHT
    grad_lse,  # [rows] fp32: gradient that arrives at the returned lse, read where HAS_GRAD_LSE
    weight_total,  # [1] fp32: sum of the class weights of the whole vocabulary
    lse,  # [rows] fp32: written where FIND_LSE, else read
    target_logit,  # [rows] fp32: written where FIND_LSE
    smooth_sum,  # [rows] fp32: sum over classes of weight * logit, written where FIND_LSE and SMOOTH
    target_gradient,  # [rows] fp32: the gradient at the target, written where KEEP_TARGET
    n_classes,  # V, of this part of the vocabulary
    label_smoothing,
    uniform,  # label_smoothing / size of the whole vocabulary
    z_loss,
    softcap,
    FIND_LSE: tl.constexpr,
    MERGE: tl.constexpr,  # the statistics hold those of other parts of the vocabulary already
    WRITE_GRADIENT: tl.constexpr,
    KEEP_TARGET: tl.constexpr,
    SMOOTH: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: the log-sum-exp in one pass, the gradient in place in a second.

    A row of 150,000 bf16 logits is 300 KB, too long for registers, so it is read twice. The second pass
    goes backwards and the hints keep what was read in the L2 cache: half of it is then not read from memory.
    """
    n = tl.program_id(0).to(tl.int64)
    row = logits + n * row_stride
    lanes = tl.arange(0, BLOCK)
    element: tl.constexpr = logits.dtype.element_ty
    t = (tl.load(target + n) - column).to(tl.int32)

    if tl.load(valid + n).to(tl.int32) == 0:
        if FIND_LSE and not MERGE:
            tl.store(lse + n, 0.0)
            tl.store(target_logit + n, 0.0)
            if SMOOTH:
                tl.store(smooth_sum + n, 0.0)
        if WRITE_GRADIENT:
            for first in range(0, n_classes, BLOCK):
                tl.store(row + first + lanes, tl.zeros([BLOCK], element), mask=first + lanes < n_classes)
        return

    owned = (t >= 0) & (t < n_classes)
    z_t = _logits(tl.load(row + t, mask=owned, other=0.0), softcap, HAS_SOFTCAP)
    if FIND_LSE:
        # Each lane keeps its own maximum and sum: one reduction at the end instead of one per step.
        STEP: tl.constexpr = 4 * BLOCK
        whole_steps = n_classes // STEP * STEP
        top = tl.full([BLOCK], LOWEST, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        smooth = tl.zeros([BLOCK], tl.float32)
        for first in range(0, whole_steps, STEP):
            top, total, smooth = _add_four_blocks(
                row, first + lanes, n_classes, class_weight, softcap, top, total, smooth,
                BLOCK, False, SMOOTH, HAS_CLASS_WEIGHT, HAS_SOFTCAP,
            )  # fmt: skip
        if whole_steps < n_classes:
            top, total, smooth = _add_four_blocks(
                row, whole_steps + lanes, n_classes, class_weight, softcap, top, total, smooth,
                BLOCK, True, SMOOTH, HAS_CLASS_WEIGHT, HAS_SOFTCAP,
            )  # fmt: skip
        row_top = tl.max(top, 0)
        # A NaN logit is lost in the maximum, but not in its lane's sum.
        row_lse = row_top + tl.log2(tl.sum(total * _exp_minus(top, row_top * LOG2_E), 0)) * LN_2
        z_sum = tl.sum(smooth, 0)
        z_found = z_t
        if MERGE:
            before = tl.load(lse + n)
            higher = tl.maximum(before, row_lse)
            higher = tl.where(higher == -float("inf"), 0.0, higher)  # all classes so far are impossible
            row_lse = higher + tl.log(tl.exp(before - higher) + tl.exp(row_lse - higher))
            z_found += tl.load(target_logit + n)
            if SMOOTH:
                z_sum += tl.load(smooth_sum + n)
        tl.store(lse + n, row_lse)
        tl.store(target_logit + n, z_found)
        if SMOOTH:
            tl.store(smooth_sum + n, z_sum)
    else:
        row_lse = tl.load(lse + n)

    if WRITE_GRADIENT:
        s = tl.load(scale + n)
        on_target = 1.0 - label_smoothing
        if HAS_CLASS_WEIGHT:
            on_target *= tl.load(target_weight + n)
        on_softmax = s * (on_target + 2.0 * z_loss * row_lse)
        if SMOOTH:
            on_softmax += s * uniform * tl.load(weight_total)
        if HAS_GRAD_LSE:
            on_softmax += tl.load(grad_lse + n)
        evenly = s * uniform
        lse2 = row_lse * LOG2_E
        g_t = _gradient(
            t, owned, z_t, lse2, on_softmax, evenly, class_weight, softcap, SMOOTH, HAS_CLASS_WEIGHT, False
        )
        g_t -= s * on_target
        if HAS_SOFTCAP:
            g_t *= _softcap_slope(z_t, softcap)
        if KEEP_TARGET:
            tl.store(target_gradient + n, g_t, mask=owned)
        tl.debug_barrier()  # no thread writes to the row before every thread has read its target
        whole_blocks = n_classes // BLOCK * BLOCK
        if whole_blocks < n_classes:
            c = whole_blocks + lanes
            inside = c < n_classes
            z = _logits(tl.load(row + c, mask=inside, other=0.0), softcap, HAS_SOFTCAP)
            g = _gradient(
                c, inside, z, lse2, on_softmax, evenly, class_weight, softcap,
                SMOOTH, HAS_CLASS_WEIGHT, HAS_SOFTCAP,
            )  # fmt: skip
            tl.store(row + c, g.to(element), mask=inside)
        for back in range(BLOCK, whole_blocks + BLOCK, BLOCK):
            c = whole_blocks - back + lanes
            z = _logits(tl.load(row + c, eviction_policy="evict_first"), softcap, HAS_SOFTCAP)
            g = _gradient(
                c, lanes >= 0, z, lse2, on_softmax, evenly, class_weight, softcap,
                SMOOTH, HAS_CLASS_WEIGHT, HAS_SOFTCAP,
            )  # fmt: skip
            tl.store(row + c, g.to(element), eviction_policy="evict_first")
        # Last and once, instead of asking of every class whether it is the target.
        tl.debug_barrier()
        tl.store(row + t, g_t.to(element), mask=owned)


@triton.jit
def prepare_rows(
    target,  # [N] int32 or int64, as given
    token_weight,  # [N], read where HAS_TOKEN_WEIGHT
    class_weight,  # [whole vocabulary] fp32, read where HAS_CLASS_WEIGHT
    out_target,  # [N] int64, relative to first_class
    valid,  # [N] bool
    scale,  # [N] fp32
    target_weight,  # [N] fp32, written where HAS_CLASS_WEIGHT
    size,  # N
    length,  # of a sequence, for SHIFT
    ignore_index, n_classes, first_class,
    SHIFT: tl.constexpr, HAS_TOKEN_WEIGHT: tl.constexpr, HAS_CLASS_WEIGHT: tl.constexpr,
    MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rows.make_token_rows in one launch. One program: N is small beside N x V, and the mean needs all."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        n = first + lanes
        inside = n < size
        source = n
        has_target = inside
        if SHIFT:
            source = n + 1
            has_target = inside & (n % length != length - 1)
        t = tl.load(target + source, mask=has_target, other=0).to(tl.int64)
        keep = has_target & (t != ignore_index)
        wrong = keep & ((t < 0) | (t >= n_classes))
        s = tl.where(keep, 1.0, 0.0)
        if HAS_TOKEN_WEIGHT:
            s = tl.load(token_weight + source, mask=keep, other=0.0).to(tl.float32)
        weight = s
        if HAS_CLASS_WEIGHT:
            w = tl.load(class_weight + t, mask=keep & (wrong == 0), other=0.0)
            tl.store(target_weight + n, w, mask=inside)
            weight = s * w
        if MEAN:
            total += tl.where(wrong, 0.0, weight)
        tl.store(out_target + n, t - first_class, mask=inside)
        tl.store(valid + n, keep, mask=inside)
        tl.store(scale + n, tl.where(wrong, float("nan"), s), mask=inside)
    if MEAN:
        whole = tl.sum(total, 0)
        # Nothing to average: 0, not 0 / 0.
        inverse = tl.where(whole == 0.0, 0.0, 1.0 / tl.where(whole == 0.0, 1.0, whole))
        tl.debug_barrier()
        for first in range(0, size, BLOCK):
            n = first + lanes
            s = tl.load(scale + n, mask=n < size, other=0.0)
            tl.store(scale + n, s * inverse, mask=n < size)


@triton.jit
def clear_targets(gradient, row_stride, target, column, rows, n_classes, BLOCK: tl.constexpr):
    """gradient[n, target[n]] = 0: add_target_rows adds that part."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    t = tl.load(target + n, mask=n < rows, other=0) - column
    owned = (n < rows) & (t >= 0) & (t < n_classes)
    zero = tl.zeros([BLOCK], gradient.dtype.element_ty)
    tl.store(gradient + n.to(tl.int64) * row_stride + t, zero, mask=owned)


@triton.jit
def add_target_rows(
    weight_gradient, weight_row, weight_column,  # [V, D], and its strides
    x, x_row, x_column,  # [N, D]
    target_gradient,  # [N] fp32
    target,  # [N], ascending
    order,  # [N]: the row each of these targets belongs to
    end,  # [N]: where the run of equal targets ends
    valid, n_classes, hidden,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """weight_gradient[v] += sum of target_gradient[n] * x[n] over the rows n whose target is v.

    The first program of each run of equal targets adds up the run, in fp32, and rounds once.
    """
    i = tl.program_id(0)
    v = tl.load(target + i).to(tl.int64)
    starts_run = i == 0
    if i > 0:
        starts_run = tl.load(target + i - 1) != v
    if starts_run & (v >= 0) & (v < n_classes):
        d = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = d < hidden
        at = weight_gradient + v * weight_row + d * weight_column
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        for k in range(i, tl.load(end + i).to(tl.int32)):
            n = tl.load(order + k)
            g = tl.where(tl.load(valid + n).to(tl.int32) != 0, tl.load(target_gradient + n), 0.0)
            total += g * tl.load(x + n * x_row + d * x_column, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, total.to(weight_gradient.dtype.element_ty), mask=inside)


@triton.jit
def scale_in_place(values, size, factor, BLOCK: tl.constexpr):
    """values *= factor[0], without touching them where the factor is 1: the usual loss.backward()."""
    f = tl.load(factor).to(tl.float32)
    if f != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
            at = first + tl.arange(0, BLOCK)
            v = tl.load(values + at, mask=at < size).to(tl.float32)
            tl.store(values + at, (v * f).to(values.dtype.element_ty), mask=at < size)
