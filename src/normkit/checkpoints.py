"""Weights in files: read what others saved, and save for others to read."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.messages import first_line
from normkit.errors import OptionError
from normkit.models import require

SAFETENSORS = ".safetensors"
PICKLED = (".pt", ".pth")
# training scripts put the weights among other things, and wrappers put a word before each name
NESTED = ("state_dict", "model", "model_state_dict", "module")
PREFIXES = ("module.", "_orig_mod.")
SHOWN = 3


def read(path: Path) -> dict[str, Tensor]:
    """The state of a model from a .safetensors file, or whatever torch.load reads safely."""
    if not path.is_file():
        raise OptionError(f"There is no file {path}.")
    if path.suffix == SAFETENSORS:
        library = require("safetensors.torch", "cli", str(path))
        try:
            return _state(library.load_file(path), path)
        except OptionError:
            raise
        except Exception as error:  # its error class is not a public name in all versions
            reason = damage(path) or f"is not a safetensors file: {first_line(error)}."
            raise OptionError(f"{path} {reason}") from error
    try:
        # mapped, if it is of the form since torch 1.6: of a checkpoint with the state of an
        # optimizer only the weights are read
        content = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except OSError:
        raise
    except Exception as error:  # bytes that are no pickle may be taken for any instruction
        reason = damage(path) or (
            "cannot be read as weights alone, and other content might run code. Expected what "
            "torch.save(model.state_dict(), path) writes, or .safetensors."
        )
        raise OptionError(f"{path} {reason}") from error
    return _state(content, path)


def damage(path: Path) -> str:
    """What is wrong with a file that stops too early, as the end of a sentence; empty if not."""
    size = path.stat().st_size
    if not size:
        return "is empty. Try to copy or download it again."
    with path.open("rb") as file:
        start = file.read(8)
        if path.suffix == SAFETENSORS:
            cut = (
                _end_of_safetensors(start, file.read(min(int.from_bytes(start, "little"), size)))
                > size
            )
        else:  # the table of contents of a zip file is its end
            cut = start.startswith(b"PK\x03\x04") and not zipfile.is_zipfile(path)
    if not cut:
        return ""
    return f"is truncated: it stops after {size:,} bytes. Try to copy or download it again."


def _end_of_safetensors(start: bytes, header: bytes) -> int:
    """How long the file says it is; 0 if it says nothing that makes sense."""
    length = int.from_bytes(start, "little")
    if len(header) < length:
        return 8 + length if header.startswith(b"{") else 0
    try:
        content = json.loads(header)
        return 8 + length + max(e["data_offsets"][1] for e in content.values() if "dtype" in e)
    except (ValueError, AttributeError, LookupError, TypeError):
        return 0


def _state(content: Any, path: Path) -> dict[str, Tensor]:
    """The names and tensors in what was loaded."""
    while isinstance(content, Mapping):
        inner = [content[n] for n in NESTED if isinstance(content.get(n), Mapping) and content[n]]
        if not inner:
            break
        content = inner[0]
    if not isinstance(content, Mapping) or not content:
        raise OptionError(f"{path} holds a {type(content).__name__}, expected names and tensors.")
    state = dict(content)
    while prefix := next((p for p in PREFIXES if all(str(n).startswith(p) for n in state)), None):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _as_in(own: Iterable[str], given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names as the model has them, where one word before all of them is the difference.

    The model may be a part of what was saved, as ``model.conv1`` of a training program, or have
    what was saved as its only part.
    """
    names = set(own)
    if names & given.keys():
        return given
    for around in {name.partition(".")[0] for name in names}:
        inside = {f"{around}.{name}": value for name, value in given.items()}
        if inside.keys() == names:
            return inside
    parts = [str(name).partition(".") for name in given]
    alike = len({head for head, _, _ in parts}) == 1 and all(rest for _, _, rest in parts)
    if not alike:
        return given
    return dict(zip((rest for _, _, rest in parts), given.values(), strict=True))


def load(model: nn.Module, path: Path, fresh: Iterable[str] = ()) -> None:
    """Give a model the weights of a file; if they do not fit it, an error and no change.

    ``fresh`` are patterns of names, such as "fc.*", that keep what the model has.
    """
    fill(model, read(path), str(path), fresh)


def fill(
    model: nn.Module, state: dict[str, Tensor], source: str, fresh: Iterable[str] = ()
) -> None:
    """The same with a state that has been read; ``source`` is what to call it."""
    patterns = list(fresh)
    own = model.state_dict()
    given = _as_in(own, state)
    if patterns:
        kept = {k for k in (*own, *given) if any(fnmatchcase(k, each) for each in patterns)}
        if unused := [p for p in patterns if not any(fnmatchcase(k, p) for k in own)]:
            raise OptionError(f"No tensor of the model has a name like {unused[0]!r}.")
        own = {k: v for k, v in own.items() if k not in kept}
        given = {k: v for k, v in given.items() if k not in kept}
    # old files and frozen norms have no counters of batches, and torch does not miss them
    missing = [k for k in own if k not in given and not k.endswith("num_batches_tracked")]
    shapes = [
        f"{k} is {_shape(v)} in the file and {_shape(own[k])} in the model"
        for k, v in given.items()
        if k in own and _shape(v) != _shape(own[k])
    ]
    unexpected = [k for k in given if k not in own and not k.endswith("num_batches_tracked")]
    wrong = [
        *_some("missing", missing),
        *_some("unexpected", unexpected),
        *_some("of another shape", shapes),
    ]
    if wrong:
        hint = f"The model has {len(own)} tensors, the file {len(given)}."
        if len(wrong) == 1 and unexpected:  # perhaps another, larger model: not for us to say
            hint += " If the rest is to be left out, save {name: state[name] for name in model"
            hint += ".state_dict()} first."
        raise OptionError(f"{source} does not fit the model: {'; '.join(wrong)}. {hint}")
    model.load_state_dict(given, strict=False)  # strict in all but the counters, see above


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _some(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = ", …" if len(names) > SHOWN else ""
    return [f"{len(names)} {what} ({', '.join(names[:SHOWN])}{more})"]


def writer(model: nn.Module, path: Path) -> Callable[[Path], None]:
    """How the state of a model is saved, by the ending of the file's name."""
    if path.suffix in PICKLED:
        return lambda target: torch.save(model.state_dict(), target)
    if path.suffix != SAFETENSORS:
        known = ", ".join((SAFETENSORS, *PICKLED))
        raise OptionError(f"{path.name}: the name has to end in one of {known}.")
    library = require("safetensors.torch", "cli", str(path))
    return lambda target: library.save_file(_separate(model), target, metadata={"format": "pt"})


def _separate(model: nn.Module) -> dict[str, Tensor]:
    """The state with memory of its own for each name, which safetensors asks for."""
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        storage = tensor.untyped_storage().data_ptr()
        state[name] = tensor.clone() if storage in seen else tensor.contiguous()
        seen.add(storage)
    return state
