"""What a factory captures: numbers and per-head tensors, in the form that FlexAttention takes.

FlexAttention compiles a captured tensor once for every value it may hold. A captured Python float
it specialises on the first time and fails on the second, so every number becomes a 0-d float64
tensor here; a mod casts it to the dtype it computes in. A tensor that requires grad must have a
head axis: FlexAttention before torch 2.14 cannot send a gradient to a 0-d tensor.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from score_mods._checks import number

Mod: TypeAlias = Callable[..., Tensor]
F = TypeVar("F", bound=Callable[..., Any])


@torch.library.custom_op("score_mods::kept", mutates_args=())
def _kept(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_kept.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def kept(x: Tensor) -> Tensor:
    """`x`, in a compiled function a contiguous copy that the compiler makes where it stands.

    Inductor folds what a mod captures into the attention kernel, which then reads what it was
    computed from: tensors of a cache, say, which may have new values by then.
    """
    return _kept(x) if torch.compiler.is_compiling() else x


def scalar(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """The 0-d tensor to capture for a number.

    Not by `torch.tensor`: made inside a compiled model, that is a constant, which torch 2.11 hands
    to the backward kernel as a number where the kernel expects a tensor.
    """
    return torch.full((), value, dtype=dtype)


def parameter(name: str, value: float | Tensor, *, positive: bool = False) -> Tensor:
    """The tensor to capture for a number or a per-head parameter.

    Args:
        name: the argument's name, for messages.
        value: a finite number, or a floating tensor of shape `()` or `(H,)`; `(1,)` is shared by
            all heads.
        positive: whether a number, or a tensor that does not require grad, must be above zero.

    Returns:
        A 0-d float64 tensor for a number; `value` itself for a tensor.

    Raises:
        TypeError: if `value` is neither a number nor a floating tensor.
        ValueError: if it has more than one axis, is a 0-d tensor that requires grad, is not finite
            or not positive.
    """
    if not isinstance(value, Tensor):
        return scalar(number(name, value, positive=positive))
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a number or a floating tensor, got {value.dtype}")
    if value.ndim > 1 or value.numel() == 0:
        raise ValueError(f"{name} must have shape (H,), got {tuple(value.shape)}")
    if value.requires_grad and value.ndim == 0:
        raise ValueError(
            f"{name} must have shape (1,) (for all heads) or (H,), got a 0-d tensor that requires "
            "grad, which FlexAttention cannot train before torch 2.14"
        )
    if not value.requires_grad:
        fits = value.isfinite() & (value > 0) if positive else value.isfinite()
        if not holds(fits):
            number(name, value[~fits][0].item(), positive=positive)
    return value


def holds(condition: Tensor) -> bool:
    """Whether a condition on values is met everywhere, as far as they can be looked at.

    They cannot in a compiled function, under `torch.func.vmap` and on the meta device.
    """
    if torch.compiler.is_compiling():
        return True
    try:
        return bool(condition.all())
    except RuntimeError:
        return True


def check_values(name: str, expected: str, value: Tensor, fits: Tensor) -> None:
    """Raise ValueError unless `fits` holds for every value."""
    if not holds(fits):
        raise ValueError(f"{name} must be {expected}, got {value[~fits][0].item():.4g}")


def at_head(value: Any, h: Tensor, dtype: torch.dtype) -> Any:
    """The captured `value` for head `h`, in `dtype`: itself if 0-d, `value[h]` if `(H,)`.

    A number, which `for_flash` makes of a 0-d tensor, stays one.
    """
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 0:
        return value.to(dtype)
    # One gather per tensor: FlexAttention compiles no second gather from a tensor that requires
    # grad.
    return value[h * 0 if value.shape[0] == 1 else h].to(dtype)


def described(mod: F, name: str, *captured: Any) -> F:
    """Give `mod` its name, its parts, the head count of what it captures, and whether it learns.

    What it captures are tensors, or mods, whose parts it then has, and whose reach unless it says
    `made_for` itself; a mod of tensors alone is its own one part.

    The head axis of a tensor is marked static: it never varies in a model, and with one more
    symbolic size the CPU's FlexAttention of torch 2.13 may not compile.

    Raises:
        ValueError: if two of them are for different numbers of heads.
    """
    heads = set()
    for item in captured:
        if not isinstance(item, Tensor):
            heads.add(getattr(item, "num_heads", None) or 1)
        elif item.ndim:  # (H,), (H, N) or (B, H, T)
            axis = 1 if item.ndim == 3 else 0
            heads.add(item.shape[axis])
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static(item, axis)
    mods = [item for item in captured if not isinstance(item, Tensor)]
    if mods and not hasattr(mod, "made_for"):
        mod.made_for = made_for(*mods)  # type: ignore[attr-defined]
    parts = [getattr(item, "parts", (getattr(item, "__name__", "mod"),)) for item in mods]
    heads.discard(1)
    if len(heads) > 1:
        raise ValueError(f"{name} needs parameters for one number of heads, got {sorted(heads)}")
    mod.__name__ = name
    mod.num_heads = heads.pop() if heads else None  # type: ignore[attr-defined]
    mod.parts = sum(parts, ()) if parts else (name,)  # type: ignore[attr-defined]
    mod.learns = any(  # type: ignore[attr-defined]
        item.requires_grad if isinstance(item, Tensor) else getattr(item, "learns", False)
        for item in captured
    )
    return mod


def arguments_of(mod: Any) -> int | None:
    """How many positional arguments without a default a plain function has; None for others."""
    if not isinstance(mod, types.FunctionType):
        return None
    return mod.__code__.co_argcount - len(mod.__defaults__ or ())


def named(mod: Any) -> str:
    """What to call `mod` in a message."""
    count = arguments_of(mod)
    if count is None:
        return type(mod).__name__
    return {4: "a mask_mod", 5: "a score_mod"}.get(count, f"a function of {count} arguments")


def is_mask_mod(mod: Callable[..., Any], name: str = "mod") -> bool:
    """Whether `mod` is a mask_mod rather than a score_mod.

    Told, as FlexAttention does, by the number of positional arguments without a default. Only
    plain functions will do: their captured tensors can be moved and counted.

    Raises:
        TypeError: if it is neither.
    """
    count = arguments_of(mod)
    if count not in (4, 5):
        raise TypeError(
            f"{name} must be a score_mod (score, b, h, q_idx, kv_idx) or a mask_mod "
            f"(b, h, q_idx, kv_idx), got {named(mod)}"
        )
    return count == 4


def check_score_mod(mod: Callable[..., Any], name: str = "score_mod") -> None:
    """Raise TypeError if `mod` is no score_mod."""
    if arguments_of(mod) != 5:
        raise TypeError(
            f"{name} must be a score_mod (score, b, h, q_idx, kv_idx), got {named(mod)}"
        )


def check_mask_mod(mod: Callable[..., Any], name: str = "mask_mod") -> None:
    """Raise TypeError if `mod` is no mask_mod."""
    if arguments_of(mod) != 4:
        raise TypeError(f"{name} must be a mask_mod (b, h, q_idx, kv_idx), got {named(mod)}")


def within(captured: Any) -> Iterator[Any]:
    """A mod, the mods inside it, and every tensor they capture."""
    yield captured
    for item in _inside(captured):
        yield from within(item)


def _inside(captured: Any) -> Iterable[Any]:
    if isinstance(captured, types.FunctionType):
        return [cell.cell_contents for cell in captured.__closure__ or ()]
    return captured if isinstance(captured, (tuple, list)) else ()


def operands(mask_mod: Mod) -> tuple[Mod, ...]:
    """The masks that torch's `and_masks` or `or_masks` made `mask_mod` of; none for another."""
    if getattr(mask_mod, "__qualname__", "") not in (
        "and_masks.<locals>.and_mask",
        "or_masks.<locals>.or_mask",
    ):
        return ()
    return tuple(inspect.getclosurevars(mask_mod).nonlocals.get("mask_mods", ()))


def made_for(*mods: Mod) -> tuple[float, float, float]:
    """The batch and the numbers of queries and keys that the tables of these mods reach to.

    A mod that looks positions up in a table says so in its attribute `made_for`; other sizes are
    infinite. Inside a compiled function nothing is looked into.
    """
    if torch.compiler.is_compiling():
        return (math.inf,) * 3
    sizes = [(math.inf,) * 3]
    for mod in mods:
        sizes.append(getattr(mod, "made_for", None) or made_for(*operands(mod)))
    batch, queries, keys = (min(column) for column in zip(*sizes, strict=True))
    return batch, queries, keys


def check_sizes(name: str, mod: Mod, batch: int, q_len: int, kv_len: int) -> None:
    """Raise ValueError if a table that `mod` looks its positions up in is too short."""
    reach = made_for(mod)
    if batch > reach[0] or q_len > reach[1] or kv_len > reach[2]:
        raise ValueError(
            f"{name} must reach to a batch of {batch}, {q_len} queries and {kv_len} keys, "
            f"got one made for {', '.join(map(str, reach))}"
        )


_moved: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _tensor_on(value: Tensor, device: torch.device) -> Tensor:
    if value.device == device:
        return value
    if value.is_meta:
        raise ValueError(
            "mod must capture tensors that have values, got one on the meta device: make it "
            'outside torch.device("meta")'
        )
    if value.requires_grad or value.is_inference():
        return value.to(device)
    version, device_before, copy = _moved.get(value, (None, None, None))
    if version != value._version or device_before != device:
        copy = value.to(device)
        _moved[value] = (value._version, device, copy)
    return copy


def rebuilt(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """`value` with every tensor in it changed: `value` itself if all stay the same objects."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list):
        items = [rebuilt(item, change) for item in value]
        return type(value)(items) if _differ(items, value) else value
    if not isinstance(value, types.FunctionType):
        return value
    contents = [cell.cell_contents for cell in value.__closure__ or ()]
    changed = [rebuilt(content, change) for content in contents]
    if not _differ(changed, contents):
        return value
    copy = types.FunctionType(
        value.__code__,
        value.__globals__,
        value.__name__,
        value.__defaults__,
        tuple(types.CellType(content) for content in changed),
    )
    copy.__dict__.update(value.__dict__)
    copy.__kwdefaults__ = value.__kwdefaults__
    copy.__qualname__ = value.__qualname__
    copy.__module__ = value.__module__
    copy.__doc__ = value.__doc__
    return copy


def _differ(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return any(a is not b for a, b in zip(new, old, strict=True))


def to_device(mod: F, device: torch.device | str) -> F:
    """The same score_mod or mask_mod with every tensor it captures on `device`, gradients kept.

    `attention` and `dense_attention` do this by themselves; call it when you hand a mod to
    `flex_attention` on a GPU, which refuses a captured tensor that lies elsewhere, and before you
    compile a model, since nothing is moved inside a compiled function. Mods inside the
    mod (as `compose` captures them), and tensors in a captured tuple or list, are followed; a
    tensor already on `device` stays the same object, so that later in-place updates of it are
    seen.

    Args:
        mod: a score_mod, mask_mod or other plain function.
        device: where its tensors should be.

    Returns:
        `mod` itself if nothing had to move, else a copy of the function.

    Raises:
        TypeError: if `mod` is no plain function.
    """
    if torch.compiler.is_compiling():
        return mod
    if not isinstance(mod, types.FunctionType):
        raise TypeError(f"mod must be a plain function, got {type(mod).__name__}")
    # "cuda" names the current GPU, whose tensors say "cuda:0".
    device = torch.empty(0, device=device).device
    return cast(F, rebuilt(mod, lambda value: _tensor_on(value, device)))
