"""A model of candid in MLflow: photos in, a table of verdicts out.

    pip install candid-vision mlflow pandas
    python mlflow_model.py waste photo.jpg ...

``log_model`` stores the folder of the model and this file ("models from code"): nothing is pickled.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import mlflow
import pandas as pd

import candid


class Verdicts(mlflow.pyfunc.PythonModel):
    """Judges the column ``image`` of a data frame: contents of files (bytes), or their names."""

    def load_context(self, context):
        self.examiner = candid.Examiner(context.artifacts["model"])

    def predict(self, context, model_input, params=None):
        return self.examiner.table(model_input["image"]).to_pandas()


def log_model(model, name="verdicts", **options):
    """Log a model, given by its folder, bundled name or hf: name; ``options`` are those of MLflow."""
    with TemporaryDirectory() as folder:
        return mlflow.pyfunc.log_model(
            name=name,
            python_model=__file__,
            artifacts={"model": str(candid.save(candid.load(model), folder))},
            pip_requirements=[f"candid-vision=={candid.__version__}"],
            **options,
        )


mlflow.models.set_model(Verdicts())

if __name__ == "__main__":
    with mlflow.start_run():
        logged = log_model(sys.argv[1])
    loaded = mlflow.pyfunc.load_model(logged.model_uri)
    photos = pd.DataFrame({"image": [Path(file).read_bytes() for file in sys.argv[2:]]})
    print(loaded.predict(photos)[["label", "confidence", "p_value", "verdict"]].to_string(index=False))
