"""``fedstill doctor``: installed versions, devices, and missing extras."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import platform
import shutil
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedstill.cli.arguments import ParsedArgs
from fedstill.cli.console import plain, print_facts, print_json
from fedstill.core.registry import first_line
from fedstill.core.version import __version__

# By extra: what it is for, and the modules that come with it.
EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "flare": ("nodes as processes and machines of their own", ("nvflare", "cryptography", "psutil")),
    "offline": ("queries and answers by files", ("cryptography",)),
    "dp": ("which layers cannot learn privately, and what takes their place", ("opacus",)),
    "text": ("Hugging Face models and tokenizers; export --format huggingface", ("transformers",)),
    "tables": ("Parquet files", ("pyarrow",)),
    "medical": ("NIfTI volumes", ("nibabel",)),
    "docs": ("the site of the documentation, make docs", ("sphinx", "myst_parser", "sphinx_gallery")),
    "skops": ("nodes' models that are files of scikit-learn, XGBoost, LightGBM", ("skops",)),
    "onnx": (
        "nodes' models that are ONNX graphs; export --format onnx",
        ("onnx", "onnxscript", "onnxruntime"),
    ),
    "track": (
        "a run's metrics in TensorBoard, MLflow, Weights & Biases",
        ("tensorboard", "mlflow", "alembic", "wandb"),
    ),
    "vision": ("torchvision's networks as custom models", ("torchvision",)),
}
MISSING = "not installed"
SHOWN = ("torch", "numpy", "scipy", "scikit-learn", "safetensors", "torchmetrics", "dp-accounting")


def doctor(args: ParsedArgs) -> None:
    """Print versions, devices, folders and missing extras."""
    report = installation_facts()
    if "--json" in args:
        print_json(report)
        return
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    missing = {
        extra: f"{EXTRAS[extra][0]}: pip install -e '.[{extra}]' "
        f"({_missing_modules(names, report['broken'])})"
        for extra, names in report["missing"].items()
    }
    there = [extra for extra in EXTRAS if extra not in missing]
    facts: dict[str, str] = {
        "versions": versions,
        "machine": report["machine"],
        "devices": ", ".join(report["devices"]),
        "threads": f"{report['threads']} in use of {report['cores']} cores that this process may use",
        "data folders": ", ".join(report["data_folders"]),
        "free here": f"{report['free_gb']:.1f} GB",
        "extras": ", ".join(there) or "none",
    }
    print_facts(plain(), facts, indent="")
    if missing:
        print("Not installed or broken, and needed for:")
        print_facts(plain(), missing)


def installation_facts() -> dict[str, Any]:
    """Return versions, devices, threads, data folders, and the missing modules of each extra."""
    import torch

    from fedstill.core.compute import available_devices
    from fedstill.data.user_data import default_folders

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lacking = {
        extra: {name: why for name in modules if (why := _import_failure_text(name))}
        for extra, (_, modules) in EXTRAS.items()
    }
    return {
        "versions": {
            "fedstill": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in SHOWN},
        },
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "devices": available_devices(),
        "threads": torch.get_num_threads(),
        "cores": cores,
        "data_folders": [
            f"{_abbreviate_home(folder)}{'' if folder.is_dir() else ' (not there)'}"
            for folder in default_folders()
        ],
        "free_gb": shutil.disk_usage(Path.cwd()).free / 1e9,
        "missing": {extra: list(names) for extra, names in lacking.items() if names},
        "broken": {name: why for names in lacking.values() for name, why in names.items() if why != MISSING},
    }


def _import_failure_text(name: str) -> str:
    """Why a module cannot be imported, which is tried; empty: it can.

    A torchvision of another torch, say, is there and fails as it is imported.
    """
    if importlib.util.find_spec(name) is None:
        return MISSING
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except (Exception, SystemExit) as error:  # another package's own, of any kind
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def _missing_modules(names: Sequence[str], broken: Mapping[str, str]) -> str:
    """Return the modules that are missing, and those that are there and cannot be imported."""
    there = [f"{name} cannot be imported ({broken[name]})" for name in names if name in broken]
    gone = [name for name in names if name not in broken]
    return "; ".join([*([f"missing: {', '.join(gone)}"] if gone else []), *there])


def _abbreviate_home(folder: Path) -> str:
    """Return a folder with ``~`` for the home folder, since people paste this output in public."""
    home = Path.home()
    return str("~" / folder.relative_to(home)) if folder.is_relative_to(home) else str(folder)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
