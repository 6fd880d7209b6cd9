"""The former home of `Predictor`. Model versions that raybert 0.2 and before registered still
import it from here: MLflow keeps that code with their bundles."""

from bert_core.inference.predictor import Predictor as Predictor
