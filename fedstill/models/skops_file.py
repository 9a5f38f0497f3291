"""An estimator of scikit-learn, XGBoost or LightGBM from a file; ``skops`` comes with the extra "skops".

Such a file is no pickle: what it holds is made of types that are allowed one by one.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from fedstill.core.errors import ArgumentError, ModelError
from fedstill.core.user_functions import OWN, first_line

# Beside those that skops itself trusts: what estimators that have learned consist of, and hold only numbers.
TRUSTED = (
    "collections.OrderedDict",
    "lightgbm.basic.Booster",
    "lightgbm.sklearn.LGBMClassifier",
    "lightgbm.sklearn.LGBMRegressor",
    "sklearn._loss.loss.HalfTweedieLossIdentity",
    "sklearn.calibration._CalibratedClassifier",
    "sklearn.calibration._SigmoidCalibration",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.gaussian_process._gpc._BinaryGaussianProcessClassifierLaplace",
    "sklearn.gaussian_process.kernels.ConstantKernel",
    "sklearn.gaussian_process.kernels.Product",
    "sklearn.gaussian_process.kernels.RBF",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.tree._tree.Tree",
    "xgboost.core.Booster",
    "xgboost.sklearn.XGBClassifier",
    "xgboost.sklearn.XGBRegressor",
)


def load(path: Path) -> Any:
    """The estimator in a file.

    Raises:
        ArgumentError: skops is not installed.
        ModelError: no skops file, or one with types that are not trusted, or of a library that is not here.
    """
    try:
        skops = importlib.import_module("skops.io")
    except ImportError as error:
        allowed = "pip install 'fedstill[skops]'"
        raise ArgumentError(path.name, "skops is not installed", allowed) from error
    try:
        others = [kind for kind in skops.get_untrusted_types(file=path) if kind not in TRUSTED]
        if others:
            allowed = "those of scikit-learn, XGBoost and LightGBM, or a function of your own that loads it"
            raise ModelError(f"{path.name} holds types {', '.join(others)}: allowed are {allowed}")
        return skops.load(path, trusted=list(TRUSTED))
    except (*OWN, BadZipFile) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path.name} is no skops file that can be read: {first_line(error)}") from error
