"""Where versions that raybert 0.2 and before registered import `Predictor`: MLflow keeps that code
beside their bundles."""

from bert_core.inference.predictor import Predictor as Predictor
