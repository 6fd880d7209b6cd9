"""Files of sentence-transformers: a folder's modules and their settings, and the methods of a task
that sentence-transformers can read (`SentenceTransformer`).

From these files, a task decides whether a folder holds a model for it; `bundle.foreign` finds the
files.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from bert_core.data.tokenizer_files import limit_in
from bert_core.errors import FormatError
from bert_core.model.config import EncoderConfig
from bert_core.tasks.base import Task
from bert_core.typed import as_type

MODULES = "modules.json"
SETTINGS = "sentence_bert_config.json"
OLD_SETTINGS = tuple(
    f"sentence_{family}_config.json"
    for family in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names that `SETTINGS` has had; the first that there is counts."""
ABOUT = "config_sentence_transformers.json"
TOKENIZER = "tokenizer_config.json"
SAYS = "sentence_transformers"
"""Entry of config.json in which CrossEncoder kept its settings before it had `ABOUT`."""
_TRANSFORMER_SETTINGS = {
    "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name",
    "unpad_inputs",
}  # fmt: skip
"""Settings of the first module that are read here, or that do not change what is computed."""
_VECTOR = "sentence_embedding"
"""sentence-transformers' name of a text's vector."""

Read = Callable[[str], Any]
"""Returns the JSON value of a file of the folder; None if there is no such file."""
Activation = Literal["sigmoid", "identity"]
_CLASSES: dict[Activation, str] = {
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
    "identity": "torch.nn.modules.linear.Identity",
}


class SentenceTransformer:
    """A task whose bundles sentence-transformers can read too."""

    @classmethod
    def from_modules(cls, read: Read) -> Task | None:
        """Return the task of a folder with a list of sentence-transformers' modules; None if the
        modules are for another task, or compute something that is not implemented here."""
        return None

    def files(self, config: EncoderConfig) -> dict[str, Any]:
        """Return the files that a bundle has besides the usual ones: path in the bundle → JSON
        value."""
        return {}

    def config_entries(self) -> dict[str, Any]:
        """Return the entries of a bundle's config.json besides those of the encoder and the
        labels."""
        return {}


def kinds_of(read: Read) -> list[str]:
    """Return the class names of the modules, in order; empty if the folder does not list modules.
    Classes that are not sentence-transformers' own have their full path."""
    kinds = [str(module.get("type", "")) for module in read(MODULES) or ()]
    return [
        kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind
        for kind in kinds
    ]


def unread_settings(read: Read) -> list[str]:
    """Return the settings of the folder that change what is computed from a text but are not
    supported here."""
    about = read(ABOUT) or {}
    odd = [name for name in ("truncate_dim", "max_active_dims") if about.get(name)]
    odd += [
        name
        for name, value in _transformer_settings(read).items()
        if value and name not in _TRANSFORMER_SETTINGS
    ]
    for kind, module in zip(kinds_of(read), read(MODULES) or (), strict=True):
        if kind == "Normalize":
            settings = read(f"{module.get('path')}/config.json") or {}
            odd += [
                f"{name} of {kind}"
                for name in ("module_input_name", "module_output_name")
                if settings.get(name, _VECTOR) != _VECTOR
            ]
    return odd


def described(read: Read) -> str:
    """Describe the modules, in order, each with the flags in its settings that differ from the
    usual value, and the `unread_settings`; empty if the folder does not list modules."""
    modules = []
    for kind, module in zip(kinds_of(read), read(MODULES) or (), strict=True):
        path = module.get("path")
        settings = (read(f"{path}/config.json") if path else _transformer_settings(read)) or {}
        flags = [
            name if value else f"{name} = false"
            for name, value in settings.items()
            if isinstance(value, bool) and value != (name == "include_prompt")
        ]
        modules.append(f"{kind} ({', '.join(flags)})" if flags else kind)
    odd = unread_settings(read) if modules else []
    return ", ".join(modules) + (f"; {', '.join(odd)}" if odd else "")


def lowers_case(read: Read) -> bool:
    """Whether texts must be lower-cased before the tokenizer, whose settings do not say that it
    lower-cases."""
    lowers = _transformer_settings(read).get("do_lower_case", False)
    return bool(lowers) and not (read(TOKENIZER) or {}).get("do_lower_case", False)


def _transformer_settings(read: Read) -> dict[str, Any]:
    return next(filter(None, map(read, (SETTINGS, *OLD_SETTINGS))), {})


def longest_of(read: Read) -> int | None:
    """Return the number of tokens to which texts are cut; None if no file says so."""
    longest = _transformer_settings(read).get("max_seq_length")
    if longest is None:  # since version 5.4 only the tokenizer's settings have it
        longest = (read(TOKENIZER) or {}).get("model_max_length")
    return limit_in(longest)


def prompts_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompts, by name, and the name of the default prompt, as options of a task.

    Args:
        about: entries of `ABOUT`.
    """
    named, chosen = about.get("prompts"), about.get("default_prompt_name")
    listed = as_type(dict[str, str | None] | None, named, ABOUT, key="prompts") or {}
    prompts = {name: text or "" for name, text in listed.items()}
    usual = as_type(str | None, chosen, ABOUT, key="default_prompt_name")
    if not prompts.get(usual):  # an empty text only serves to turn a default prompt off
        usual, prompts = None, {name: text for name, text in prompts.items() if text}
    return {"prompts": prompts, "default_prompt": usual}


def check_cross_encoder(settings: Mapping[str, Any], read: Read) -> None:
    """Check that a folder of CrossEncoder, if it is one, reads pairs of texts in the usual way.

    Args:
        settings: the folder's settings, from `settings_of`.
    Raises: FormatError if it puts a prompt before the texts, or changes how they are tokenized.
    """
    if settings.get("model_type") != "CrossEncoder":
        return
    if prompt := prompts_of(settings)["default_prompt"]:
        raise FormatError(
            f"{ABOUT}: wanted no default_prompt_name, since no prompt is put before a pair of "
            f"texts, got {prompt!r}: set it to null, and put the prompt before the first text "
            "yourself"
        )
    odd = unread_settings(read) + (["do_lower_case"] if lowers_case(read) else [])
    if odd:
        raise FormatError(
            f"{SETTINGS}: wanted the usual settings of a CrossEncoder, got {', '.join(odd)}, "
            "which changes how it reads texts: remove it if it is not needed"
        )


def prompt_entries(prompts: Mapping[str, str], default: str | None) -> dict[str, Any]:
    """Return the entries of `ABOUT` from which `prompts_of` reads these prompts."""
    return {"prompts": dict(prompts), "default_prompt_name": default}


def modules_of(types: list[str]) -> list[dict[str, Any]]:
    """Return the list of modules for `MODULES`. The first module is in the folder itself, each
    other in a subfolder.

    Args:
        types: the full class names, in order.
    """
    return [
        {
            "idx": place,
            "name": str(place),
            "path": f"{place}_{kind.rpartition('.')[2]}" if place else "",
            "type": kind,
        }
        for place, kind in enumerate(types)
    ]


def settings_of(entries: Mapping[str, Any], read: Read) -> dict[str, Any]:
    """Return the settings of a model besides those of its modules, from every place in which a
    version of sentence-transformers keeps them.

    Args:
        entries: those of config.json.
    """
    settings = entries.get(SAYS)
    about = settings if isinstance(settings, dict) else {}
    older = entries.get("sbert_ce_default_activation_function")  # before version 4
    return {
        **({} if older is None else {"activation_fn": older}),
        **about,
        **(read(ABOUT) or {}),
        "max_seq_length": longest_of(read),
    }


def activation_of(entries: Mapping[str, Any], outputs: int) -> Activation | None:
    """Return the function that CrossEncoder applies to a model's only output. None if the model is
    not CrossEncoder's, has several outputs, or has a function that is not implemented here.

    Args:
        entries: those of config.json, with `settings_of` under `SAYS`.
        outputs: the number of outputs of the model.
    """
    settings = entries.get(SAYS)
    if outputs != 1 or not isinstance(settings, dict):
        return None
    name = settings.get("activation_fn")
    if name is None:
        is_its_own = "version" in settings or settings.get("model_type") == "CrossEncoder"
        return "sigmoid" if is_its_own else None
    if not str(name).startswith("torch."):
        return "sigmoid"  # CrossEncoder runs only torch's functions, and otherwise its default
    endings = {path.rpartition(".")[2]: activation for activation, path in _CLASSES.items()}
    return endings.get(str(name).rpartition(".")[2])


def activation_entry(activation: Activation) -> dict[str, Any]:
    """Return the entry of config.json that makes CrossEncoder (version 4 or later) apply the
    function."""
    return {SAYS: {"activation_fn": _CLASSES[activation]}}
