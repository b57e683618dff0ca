"""Attention with a score_mod and a mask_mod: compiled FlexAttention, or the dense form."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from score_mods._captured import Mod, to_device, within
from score_mods._checks import boolean
from score_mods.dense import check, dense_attention
from score_mods.kernel_options import flash_obstacle, for_flash, kernel_options, prefers_flash
from score_mods.masks import causal, create_block_mask, mask_of

# Torch counts the graphs of one function over all the score_mods and lengths of a process, and
# stops compiling at 8.
_LIMITS: dict[str, Any] = {"recompile_limit": 1024, "accumulated_recompile_limit": 1024}


@lru_cache(maxsize=2)
def _compiled(dynamic: bool | None = None) -> Any:
    return torch.compile(flex_attention, fullgraph=True, dynamic=dynamic)


def _kernel_options(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None,
    mask_mod: Mod | BlockMask | None,
    backend: str,
    return_lse: bool = False,
) -> dict[str, Any] | None:
    """What to tell FlexAttention about its kernel."""
    if backend == "auto" and prefers_flash(q, k, v, score_mod, mask_mod, return_lse):
        return {"BACKEND": "FLASH"}
    if backend == "flash":
        obstacle = flash_obstacle(q, k, v, score_mod, mask_mod, return_lse)
        if obstacle is not None:
            raise ValueError(f'backend="flash" cannot be used: {obstacle}; use backend="triton"')
        return {"BACKEND": "FLASH"}
    # Fewer than 128 queries get FlexAttention's decoding kernel, which has options of its own.
    if q.device.type != "cuda" or q.shape[2] < 128:
        return None
    if isinstance(mask_mod, BlockMask) and any(size % 128 for size in mask_mod.BLOCK_SIZE):
        return None
    return kernel_options(
        q.shape[3],
        q.dtype,
        score_mod=score_mod is not None,
        learns=_learns(score_mod),
        contiguous=mask_mod is None or mask_mod is causal,
        device=q.device,
    )


def _learns(score_mod: Mod | None) -> bool:
    """Whether FlexAttention's backward is to give a gradient to something the score_mod captures.

    In a model that is being compiled, only the library's own mods say so.
    """
    if score_mod is None or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        return getattr(score_mod, "learns", False)
    return any(isinstance(x, Tensor) and x.requires_grad for x in within(score_mod))


def check_impl(impl: str, backend: str = "auto") -> None:
    """Raise ValueError if `attention` has no such implementation, or the dense form a backend."""
    if impl not in ("flex", "dense"):
        raise ValueError(f'impl must be "flex" or "dense", got {impl!r}')
    if backend not in ("auto", "triton", "flash"):
        raise ValueError(f'backend must be "auto", "triton" or "flash", got {backend!r}')
    if impl == "dense" and backend != "auto":
        raise ValueError(f'backend must be "auto" with impl="dense", got {backend!r}')


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | BlockMask | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    impl: str = "flex",
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with a score_mod and a mask_mod, by compiled FlexAttention.

    out = softmax(mask(score_mod(scale q kᵀ))) v. FlexAttention is compiled once and kept, without
    torch's limit of eight score_mods in a process; inside a model that is being compiled, its
    plain form joins the model's graph. The mask's blocks are cached and built without a T×T tensor
    (`create_block_mask`). Tensors that a mod captures are moved to q's device.

    Args:
        q: queries, `(B, H, T_q, D)`.
        k: keys, `(B, H_kv, T, D)`.
        v: values, `(B, H_kv, T, D_v)`.
        score_mod: a score_mod, or None.
        mask_mod: a mask_mod, a BlockMask for these lengths, or None (every query sees every key).
        scale: factor of the scores, 1/sqrt(D) if not given.
        enable_gqa: allow H to be a multiple of H_kv.
        return_lse: whether to return the rows' log-sum-exp too.
        impl: "flex", or "dense" for `dense_attention`: any dtype, differentiable on a CPU, T²
            memory.
        backend: FlexAttention's kernels: "triton", "flash" (flash-attn-4), or "auto", which is
            "flash" where that was measured to be faster: on a Hopper GPU for 4096 queries and
            more, no mask or `causal`, and no score_mod or `scale_invariant` (at head size 64 only
            if q, k or v needs a gradient). "flash" takes bfloat16 and float16, head sizes 64 and
            128, masks that capture no tensor, and the score_mods of `for_flash` with as many heads
            of keys as of queries; no `return_lse`, no deterministic algorithms, no model that is
            being compiled.

    Returns:
        `(B, H, T_q, D_v)`, with `return_lse` also the natural log of each row's sum, `(B, H,
        T_q)`. A row that sees no key gives 0 and -inf.

    Raises:
        TypeError: if an argument has the wrong type, or a mod the wrong number of arguments.
        ValueError: if shapes, dtypes, devices or lengths do not fit, or if FlexAttention cannot do
            this: gradients or lse on a CPU, float64, head sizes below 16 on a GPU, or what
            `backend="flash"` does not take. The message names the way that works.

    >>> import score_mods
    >>> q = k = v = torch.randn(1, 2, 8, 16)
    >>> mod = score_mods.scale_invariant()
    >>> out = score_mods.attention(q, k, v, mod, score_mods.causal, impl="dense")
    >>> out.shape
    torch.Size([1, 2, 8, 16])
    """
    check_impl(impl, backend)
    check(q, k, v, score_mod, mask_mod, scale, enable_gqa)
    boolean("return_lse", return_lse)
    if impl == "dense":
        dense_mask = mask_of(mask_mod) if isinstance(mask_mod, BlockMask) else mask_mod
        return dense_attention(q, k, v, score_mod, dense_mask, scale=scale, return_lse=return_lse)

    if q.dtype == torch.float64:
        raise ValueError('FlexAttention does not take float64; use impl="dense"')
    if q.device.type == "cpu":
        if return_lse:
            raise ValueError('compiled FlexAttention gives no lse on a CPU; use impl="dense"')
        learnable = () if torch.compiler.is_compiling() else within(score_mod)
        tensors = (x for x in (q, k, v, *learnable) if isinstance(x, Tensor))
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise ValueError(
                'FlexAttention has no backward on a CPU; use impl="dense", or torch.no_grad()'
            )
        q, k, v = q.detach(), k.detach(), v.detach()
    elif min(q.shape[3], v.shape[3]) < 16:
        raise ValueError(
            "FlexAttention takes head sizes of 16 and more on a GPU, "
            f'got {q.shape[3]} and {v.shape[3]}; use impl="dense"'
        )

    kernel = _kernel_options(q, k, v, score_mod, mask_mod, backend, return_lse)
    flash = kernel is not None and "BACKEND" in kernel
    compiling = torch.compiler.is_compiling()
    if score_mod is not None and not compiling:
        score_mod = to_device(for_flash(score_mod) if flash else score_mod, q.device)
    if mask_mod is not None and not isinstance(mask_mod, BlockMask):
        mask_mod = create_block_mask(
            mask_mod, q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device
        )
    options: dict[str, Any] = {
        "score_mod": score_mod,
        "block_mask": mask_mod,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "kernel_options": kernel,
        "return_aux": AuxRequest(lse=True) if return_lse else None,
    }
    if compiling:
        result = flex_attention(q, k, v, **options)
    elif flash:
        with torch._dynamo.config.patch(specialize_float=True, **_LIMITS):
            result = _compiled(dynamic=False)(q, k, v, **options)
    else:
        try:  # without the patch, which would take longer than the rest of this function
            result = _compiled()(q, k, v, **options)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            with torch._dynamo.config.patch(**_LIMITS):
                result = _compiled()(q, k, v, **options)
    return (result[0], result[1].lse) if return_lse else result
