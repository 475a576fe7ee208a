"""Hugging Face folders: checked when read, written atomically, compared after writing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from rlhf_core.data.text import excerpt, safe_text
from rlhf_core.errors import ModelError, RlhfError, first_line, is_exhausted, is_panic
from rlhf_core.hub import require_hub
from rlhf_core.models.architecture import evaluation_mode, has_plain_head, name_outputs
from rlhf_core.models.folder_check import (
    ADAPTER_CONFIG,
    REPAIR,
    SMALL_FILES,
    _json_fault,
    check_folder,
    require_own_files,
)
from rlhf_core.models.kernels import FusedNorm, use_kernels
from rlhf_core.models.precision import use_float32_unembedding
from rlhf_core.runtime import distributed
from rlhf_core.storage.files import atomic_dir, atomic_write_json, fsync_path

logger = logging.getLogger(__name__)

WEIGHT_FILES = "model*.safetensors"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
JSON_FILES = (
    "config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)
NO_BACKEND = (
    "backend tokenizer"  # of what transformers says where it has nothing to make a tokenizer of
)
OWN_CODE = "custom code"  # as transformers says it

FROM_HUB = "is it spelt right, and is the hub reachable? HF_HUB_OFFLINE=1 uses a copy in the cache"


def is_local(source: str | Path) -> bool:
    """Whether ``source`` names a folder rather than a hub id such as ``owner/name``."""
    if isinstance(source, Path):
        return True
    return Path(source).exists() or source.startswith((".", "/", "~")) or source.count("/") > 1


@contextmanager
def reading(source: str | Path) -> Iterator[None]:
    """Check a folder or the hub, and turn errors of loading into ``ModelError``.

    Libraries are silenced meanwhile.
    """
    if is_local(source):
        check_folder(Path(source))
    elif not isinstance(try_to_load_from_cache(str(source), "config.json"), str):
        require_hub(str(source), ModelError)
    try:
        with quiet():
            yield
    except RlhfError:
        raise
    # Whatever a library comes upon in files that are damaged or of another kind.
    except Exception as error:
        if is_exhausted(error):
            raise
        cause = _cause(source, error)
        kind, remedy = ("folder", REPAIR) if is_local(source) else ("hub id", FROM_HUB)
        if OWN_CODE in cause:
            remedy = "code that comes with a model is never run: give a model that transformers itself knows"
        raise ModelError(f"cannot load the model {kind} {source}: {cause}; {remedy}") from error


def _cause(source: str | Path, error: Exception) -> str:
    """Why a model cannot be loaded, in one line.

    A damaged file of a folder by its name, else what the library says.
    """
    said = first_line(error)
    if not is_local(source):
        return said
    files = (Path(source) / name for name in JSON_FILES)
    faults = (fault for file in files if file.is_file() and (fault := _json_fault(file)))
    without_vocabulary = not any((Path(source) / name).is_file() for name in VOCABULARIES)
    missing = (
        f"it has no vocabulary ({VOCABULARIES[0]})"
        if without_vocabulary and NO_BACKEND in said
        else ""
    )
    return next(faults, missing or said)


def hub_files(source: str, revision: str | None) -> Path | None:
    """The folder in the cache with a hub id's small files, checked as a folder is.

    None where it cannot be had.

    Raises:
        ModelError: They name what lies outside of the folder, or another model.
    """
    try:
        with quiet():
            folder = Path(
                snapshot_download(source, revision=revision, allow_patterns=list(SMALL_FILES))
            )
    except Exception:  # of several libraries; whoever loads the model says what is wrong
        return None
    if (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{source} holds an adapter ({ADAPTER_CONFIG}), which names the model to load; merge the two (peft's "
            "merge_and_unload), and name the folder with the result"
        )
    require_own_files(folder)
    return folder


def require_room_for(tokenizer: PreTrainedTokenizerBase, entries: int, source: str | Path) -> None:
    """Raise ``ModelError`` where a tokenizer has more entries than the embedding of the model.

    Fewer are common.
    """
    if len(tokenizer) > entries:
        raise ModelError(
            f"{source}: the tokenizer has {len(tokenizer)} entries, the model only {entries}; take the tokenizer that "
            f"belongs to it, or save the model after resize_token_embeddings({len(tokenizer)})"
        )


def empty_model(auto_class: Any, config: PretrainedConfig) -> Any:
    """The model that ``auto_class`` makes of ``config``, with shapes alone."""
    with torch.device("meta"):
        return auto_class.from_config(
            config, trust_remote_code=False, attn_implementation=attention_of(auto_class, config)
        )


def load_model(
    auto_class: Any,
    source: str | Path,
    dtype: torch.dtype | None,
    revision: str | None = None,
    device: torch.device | None = None,
) -> Any:
    """Load a model on ``device`` by ``auto_class.from_pretrained``.

    Only safetensors, never remote code.

    The logits of a low-precision language model are computed in float32.

    Args:
        dtype: Precision of the weights; None keeps that of the files.
        device: None for this process's own.

    Raises:
        ModelError: The folder lacks weights of the model, or has them in other shapes, which the
            library would fill at random, or some of them are not finite.
    """
    place = device or distributed.device()
    # A model on its way to a GPU is in host memory as a whole.
    turn = nullcontext() if place.type == "cpu" else distributed.one_of_machine_at_a_time()
    with reading(source), turn:
        if not is_local(source):
            hub_files(str(source), revision)
        config = AutoConfig.from_pretrained(str(source), revision=revision, trust_remote_code=False)
        model, info = auto_class.from_pretrained(
            str(source),
            revision=revision,
            dtype=dtype if dtype is not None else "auto",
            attn_implementation=attention_of(auto_class, config),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
        model = model.to(place)
    if info["mismatched_keys"]:
        name, stored, expected = sorted(info["mismatched_keys"])[0]
        raise ModelError(
            f"{source}: the weight {name} has the shape {list(stored)}, but config.json asks for {list(expected)} "
            f"({len(info['mismatched_keys'])} such weights in all); {REPAIR}"
        )
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise ModelError(
            f"{source} lacks {len(names)} of the weights of a {type(model).__name__}, such as {names[0]}; {REPAIR}"
        )
    require_finite_weights(model, source)
    if info["unexpected_keys"]:
        names = sorted(info["unexpected_keys"])
        kind = type(model).__name__
        logger.warning(
            "%s: %d weights, such as %s, are no part of a %s and left out",
            source,
            len(names),
            safe_text(excerpt(names[0])),
            kind,
        )
    name_outputs(model)
    use_float32_unembedding(model)
    model.eval()
    use_kernels(model)
    with reading(source):
        has_plain_head(model)  # is noted in the model, before an engine may shard its weights
    return model


def require_finite_weights(model: nn.Module, source: str | Path) -> None:
    """Raise ``ModelError`` where a weight is NaN or infinite.

    Every loss would be, and every reply empty.
    """
    broken = [name for name, weight in model.named_parameters() if not _is_finite(weight)]
    if broken:
        raise ModelError(
            f"{source} has weights that are not finite numbers, in {broken[0]} ({len(broken)} such tensors): it is "
            "damaged, or was converted to float16 beyond its range; get it again"
        )


def _is_finite(weight: Tensor) -> bool:
    if (
        weight.is_meta
        or not weight.is_floating_point()
        or weight.itemsize == 1
        or not weight.numel()
    ):
        return True
    # NaN is both; no copy of the weight is made.
    extremes = torch.stack(weight.detach().aminmax())
    return bool(extremes.isfinite().all())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and warnings of libraries inside the block.

    A panic of tokenizers or safetensors, which is no ``Exception``, becomes a ``RuntimeError``.
    """
    disabled = logging.root.manager.disable
    bars = transformers_logging.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise RuntimeError(first_line(error)) from error
    finally:
        logging.disable(disabled)
        if bars:
            transformers_logging.enable_progress_bar()


def save_folder(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    json_files: Mapping[str, Any] | None = None,
    verify: Callable[[Path], None] | None = None,
    tensor_files: Mapping[str, dict[str, Tensor]] | None = None,
) -> None:
    """Write a Hugging Face folder atomically.

    Args:
        json_files: Further files by name, written as JSON.
        verify: Called with the new folder before it replaces ``path``; if it raises, the old folder
            stays.
        tensor_files: Further files by name, written as safetensors.
    """
    with atomic_dir(Path(path)) as folder:
        with quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        for name in (*(json_files or {}), *(tensor_files or {})):
            (folder / name).parent.mkdir(exist_ok=True)
        for name, value in (json_files or {}).items():
            atomic_write_json(folder / name, value)
        for name, tensors in (tensor_files or {}).items():
            save_file(tensors, folder / name)
        # safetensors makes its files readable by their owner alone; a server may run as another
        # user.
        for file in folder.rglob("*.safetensors"):
            file.chmod((folder / "config.json").stat().st_mode & 0o777)
        if verify is not None:
            verify(folder)
        # A folder that exists after a power cut is complete.
        for file in (*folder.rglob("*"), folder):
            fsync_path(file)


def require_same(
    path: Path,
    folder: Path,
    model: PreTrainedModel,
    auto_class: Any,
    probe: Callable[[PreTrainedModel], Tensor],
) -> None:
    """Check that ``folder`` holds what ``model`` computes with; no second model is made for it.

    The saved weights are compared one after another, on the CPU, in all bits. What the saved
    configuration describes is built without weights, given those of ``model``, and has to compute
    the same.

    Args:
        path: What messages call the folder.
        auto_class: By which the folder will be loaded.
        probe: Outputs of a model in evaluation mode for fixed tokens. They are fewer rows than
            OpenBLAS takes, so that its rounding never counts as a difference.

    Raises:
        ModelError: Something differs.
    """
    differing = _first_difference(folder, model, auto_class)
    if differing is None:
        with reading(folder):
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
            what = difference_from_config(model, config, auto_class, probe)
        if what is None:
            return
    else:
        what = f"the weight {differing} is another one"
    raise ModelError(
        f"the model saved at {path} is not the trained one ({what}); nothing was published: config.json and the "
        "weights do not hold all that it computes with (such as a module that was exchanged), or the disk lost some"
    )


def _first_difference(folder: Path, model: PreTrainedModel, auto_class: Any) -> str | None:
    """Name of a tensor that was not saved bit for bit as in ``model``; None where all were.

    Tied ones count once.
    """
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    same = {
        own[name].data_ptr()
        for name, saved in _saved_tensors(folder, own, auto_class)
        if saved.dtype == own[name].dtype and torch.equal(saved, own[name].cpu())
    }
    return next(
        (name for name, tensor in own.items() if tensor.numel() and tensor.data_ptr() not in same),
        None,
    )


def _saved_tensors(
    folder: Path, own: Mapping[str, Tensor], auto_class: Any
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of ``own`` that was saved, as it is in the files."""
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(file, framework="pt"))
            for file in sorted(folder.glob(WEIGHT_FILES))
        ]
        names = []
        for file in files:
            names += [(name, file) for name in file.keys()]  # noqa: SIM118 - no mapping
        if all(name in own for name, _ in names):
            yield from ((name, file.get_tensor(name)) for name, file in names)
            return
    # The library writes some architectures, such as mixtures of experts, in another form than it
    # computes with.
    copy = load_model(auto_class, folder, None, device=torch.device("cpu"))
    yield from ((name, tensor) for name, tensor in copy.state_dict().items() if name in own)


def difference_from_config(
    model: PreTrainedModel,
    config: PretrainedConfig,
    auto_class: Any,
    probe: Callable[[PreTrainedModel], Tensor],
) -> str | None:
    """Tell in what a model differs from the one that ``config`` describes; None where it does not.

    That one is built without weights, and given those of ``model``.

    Args:
        auto_class: By which it is built.
        probe: As :func:`require_same` takes it.
    """
    twin: PreTrainedModel = empty_model(auto_class, config)
    modules = dict(model.named_modules())
    for path, module in twin.named_modules():
        own = modules.get(path)
        for kind in ("_parameters", "_buffers"):
            places, tensors = getattr(module, kind), getattr(own, kind, {})
            # What a cache has put beside a module's own buffers is left where it is.
            added = tensors if kind == "_parameters" else ()
            for name in dict.fromkeys((*places, *added)):
                tensor, empty = tensors.get(name), places.get(name)
                full = f"{path}.{name}".removeprefix(".")
                if tensor is None and empty is not None:
                    return f"it lacks {full}"
                if tensor is not None and empty is None:
                    return f"its {full} is one too many"
                if tensor is not None and empty is not None and tensor.shape != empty.shape:
                    return f"its {full} has the shape {list(tensor.shape)}, not {list(empty.shape)}"
                places[name] = tensor
        if isinstance(own, FusedNorm):
            use_kernels(module)
    with torch.no_grad(), evaluation_mode(model):
        expected = probe(model).cpu()
        computed = probe(twin.eval()).cpu()
    same = torch.allclose(computed, expected, atol=1e-5, rtol=1e-4)
    return None if same else "it does not compute the same"


def load_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copy an engine's trained weights into the model, in place; its other parameters stay."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)


def attention_of(auto_class: Any, config: PretrainedConfig) -> str:
    """``sdpa``, scaled-dot-product attention, or ``eager`` for an architecture that cannot have it.

    Gemma 2, whose scores have a soft cap, and BLOOM are such. Eager attention holds the scores of
    all positions.

    Args:
        auto_class: ``AutoModelForCausalLM`` or another of its kind, by which the model is made.
        config: The model's.
    """
    known = type(config) in auto_class._model_mapping
    return (
        "sdpa" if not known or auto_class._model_mapping[type(config)]._supports_sdpa else "eager"
    )
