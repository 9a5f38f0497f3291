"""External references for experiments/tables.toml: scikit-learn models on the pooled rows of all nodes.

    python experiments/tables.py

The test rows are those of the comparison's runs: they are sampled with data.seed, which is 0 in all of them.
"""

from __future__ import annotations

import numpy as np
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedstill.data import make_data_config
from fedstill.data.loading import load
from fedstill.tasks import TASKS

SEEDS = 3
SETS = {"breast-cancer": "tabular", "wine": "tabular", "diabetes": "regression"}

if __name__ == "__main__":
    for name, task in SETS.items():
        data = load(make_data_config(name), TASKS[task]())
        x, y, u, v = (
            part.numpy()
            for part in (data.train.inputs, data.train.targets, data.test.inputs, data.test.targets)
        )
        classes = task == "tabular"
        linear = LogisticRegression(max_iter=5000) if classes else LinearRegression()
        forest = RandomForestClassifier if classes else RandomForestRegressor
        references = {
            "linear": [make_pipeline(StandardScaler(), linear)],
            "forest": [forest(300, random_state=seed) for seed in range(SEEDS)],
        }
        for called, models in references.items():
            reached = [100 * model.fit(x, y.ravel()).score(u, v.ravel()) for model in models]
            record = f"{np.mean(reached):.1f} \u00b1 {np.std(reached, ddof=1) if len(reached) > 1 else 0:.1f}"
            print(f"{name:14} {called:7} {record} {'accuracy' if classes else 'R2'}, {len(u)} test rows")
