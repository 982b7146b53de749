"""Libraries whose frames only pass a call on: what the reader wants is the line that called them."""

PASS_CALLS_ON = ("einops", "typing_extensions", "jaxtyping", "beartype", "opt_einsum", "triton")
